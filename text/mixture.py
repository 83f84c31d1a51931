"""The sources of a mixture, which --mix names one by one.

    --mix='c4 0.7 allenai/c4:en' --mix='mine 0.3 my/*.txt'      NAME SHARE DATASET

A source is tokenized on its own, into the folder DATA_DIR/NAME. `data.Mixture` draws samples from
all of them, each as often as its share says.
"""

import itertools
import os
import re
from dataclasses import dataclass

from program import quote, require


@dataclass(frozen=True)
class Source:
    """One source of a mixture."""

    name: str
    share: float  # of the samples, to four decimals
    dataset: str


def sources(mix: list[str]) -> list[Source]:
    """The sources that the lines of `mix` describe.

    Raises UserError for a line that describes none, if two have one name (capitals aside, as in
    some file systems) or data set, or if the shares do not add up to 1.
    """
    found = [source_of(line) for line in mix]
    for one, other in itertools.combinations(found, 2):
        names = f"{one.name} and {other.name}"
        same_name = one.name.lower() == other.name.lower()
        require(not same_name, f"mix has two sources of one name, {names}: rename one of them")
        require(
            one.dataset != other.dataset,
            f"mix has the data set {quote(one.dataset)} twice, as {names}: "
            "name it once, with both shares together",
        )
    total = round(sum(source.share for source in found), 4)
    require(not mix or total == 1, f"the shares of mix add up to {total:g}, not 1: change them")
    return found


def source_of(line: str) -> Source:
    """The source that a line of `mix` describes. Raises UserError.

    The data set comes last, so it may hold any character.
    """
    words = line.split(None, 2)
    example = "--mix='c4 0.7 allenai/c4:en'"
    require(len(words) == 3, f"mix takes NAME SHARE DATASET, as {example}, not {quote(line)}")
    name, share, dataset = words

    problem = f"mix has a source {quote(name)}"
    is_name = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", name)
    require(is_name, f"{problem}: name it with up to 40 letters, digits, _ and -")

    is_share = re.fullmatch(r"1(\.0*)?|0?\.[0-9]{1,4}", share) and float(share) > 0
    fix = "write a number from 0.0001 to 1, of at most four decimals"
    require(is_share, f"{problem} with the share {quote(share)}: {fix}")
    return Source(name, float(share), os.path.expanduser(dataset.strip()))

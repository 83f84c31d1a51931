"""Another right answer: a comprehension over the lines, and a run that ended in NaN."""

import json
from pathlib import Path

DIVERGES = 0.2
FINAL_LOSSES = {0.002: 6.4, 0.02: 6.65, 0.2: float("nan")}


def losses(path):
    rows = map(json.loads, Path(path).read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]

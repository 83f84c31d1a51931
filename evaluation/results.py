"""Files of results: an interrupted evaluation resumes from them.

    scores.json             the settings, and the figures of all finished tasks
    scores.json.part-K-0    scores of single requests, by global rank; K: weights and precision

Part files are removed when all tasks are finished. Results of other weights, another tokenizer or
another precision are never mixed: the program refuses them.

Run `python -m evaluation.results scores.json` to see which tasks a file holds.
"""

import contextlib
import hashlib
import json
import time
from pathlib import Path

import processes
import program
from evaluation.figures import FIGURES
from program import UserError, require
from storage import files

PART_SECONDS = 30  # between two writes of the newest scores


class Part:
    """Scores of single requests, in files beside `out`: one for each global rank.

    A file has one writer, so its name has the global rank. Ranks with the same data-parallel rank
    score the same requests and write the same rows.

    known: {Request.key: [sum of log-probabilities, greedy]} of earlier runs, of any number of
    ranks. Constructing a Part is a collective.
    """

    def __init__(self, out: str, key: str, global_rank: int):
        self.pattern = f"{Path(out).name}.part-{key}-*"
        self.path = Path(f"{out}.part-{key}-{global_rank}")
        self.unwritten = ""
        self.written_at = time.monotonic()
        self.known = processes.rank_zero_decides(self.read)

    def read(self) -> dict:
        """The scores in the files of all ranks, without damaged lines."""
        known = {}
        for path in self.path.parent.glob(self.pattern):
            for line in files.read_bytes(path).split(b"\n"):
                with contextlib.suppress(UserError):  # a line that a crash cut short
                    row = files.parse_json(line, str(path), list)
                    if is_score(row):
                        key, *values = row
                        known[key] = values
        return known

    def add(self, keys: list[str], scores: list[list[float]]) -> None:
        """Keep the scores of some requests, and write what is kept every PART_SECONDS."""
        for key, values in zip(keys, scores, strict=True):
            self.unwritten += json.dumps([key, *values]) + "\n"
        if time.monotonic() - self.written_at > PART_SECONDS:
            with open(self.path, "a") as file:
                file.write("\n" + self.unwritten)  # on a new line, even after one cut short
            self.unwritten = ""
            self.written_at = time.monotonic()

    def remove(self) -> None:
        """Delete the files of all ranks. Rank 0 does so when all tasks are finished."""
        for path in self.path.parent.glob(self.pattern):
            path.unlink()


def is_score(row: list) -> bool:
    """Whether a row of a part file is [key, sum, greedy]."""
    if len(row) != 3 or not isinstance(row[0], str):
        return False
    return all(files.has_type(value, float) for value in row[1:])


def finished(out: str, settings: dict) -> dict:
    """The figures of the tasks in an earlier `out`: {task: figures}.

    Raises UserError if it is not a file of results, or of other weights, precision or ids than
    `settings`.
    """
    if not (out and Path(out).exists()):
        return {}
    fix = "choose another --out"
    earlier = files.read_json(out, dict, {"settings": dict, "tasks": dict}, fix)
    fixed = {key: earlier["settings"].get(key) for key in ("weights", "precision", "ids")}
    results = earlier["tasks"]
    complete = None not in fixed.values() and all(has_figures(r) for r in results.values())
    require(complete, f"{out} holds no results of `python -m evaluation`: {fix}")
    for key, value in fixed.items():
        require(
            value == settings[key],
            f"{out} holds results with {key} {program.one_line(value)}, not {settings[key]}: {fix}",
        )
    return results


def has_figures(result) -> bool:
    """Whether a result in a file has all figures that the table prints.

    A result without a digest passes: it is computed again, and not printed.
    """
    if not isinstance(result, dict):
        return False
    if "digest" not in result:
        return True
    kind = result.get("kind")
    names = FIGURES.get(kind) if isinstance(kind, str) else None
    return names is not None and all(files.has_type(result.get(name), float) for name in names)


def save(out: str, settings: dict, results: dict) -> None:
    """Write the settings and the figures of all finished tasks."""
    content = json.dumps({"settings": settings, "tasks": results}, indent=2)
    files.write_atomically(Path(out), content.encode())


def fingerprint(model) -> str:
    """A short hash of the first 16 numbers of each weight: it tells models and steps apart."""
    heads = []
    for param in model.parameters():
        heads.append(param.detach().flatten()[:16].float().cpu().numpy().tobytes())
    return hashlib.sha256(b"".join(heads)).hexdigest()[:16]


def main(argv) -> None:
    """Print the model and the tasks of a file of results."""
    (path,) = program.arguments(argv, "FILE.json")
    content = files.read_json(path, dict, {"settings": dict, "tasks": dict})
    print(f"{path}: {files.shown(content['settings'].get('model'))}")
    for name, result in content["tasks"].items():
        digest = result.get("digest") if isinstance(result, dict) else None
        print(f"  {name}: digest {files.shown(digest)}")


if __name__ == "__main__":
    program.run(main)

"""Files of results: an interrupted evaluation goes on with the first task that they lack.

A file holds the settings, and the figures of all finished tasks. Results of other weights, another
tokenizer or another precision are never mixed: the program refuses them.
"""

import hashlib
import json
from pathlib import Path

import program
from evaluation.figures import FIGURES
from program import require
from storage import files


def finished(out: str, settings: dict) -> dict:
    """{task: figures} of an earlier `out`. UserError if weights, precision or ids are others."""
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
    """Has a result all figures that the table prints? One without a digest is computed again."""
    if not isinstance(result, dict):
        return False
    if "digest" not in result:
        return True
    names = FIGURES.get(str(result.get("kind")))
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

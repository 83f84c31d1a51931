"""The model card of a run: what was trained, on what, and how well, in the format of the Hub.

    python -m weights.card runs/demo                 writes runs/demo/card.md and loss.png
    python -m weights.card runs/demo --out=my.md     my.md and loss.png beside it

Markdown, whose first lines are YAML for the Hub, with the picture that lifecycle/plot.py draws. It
says what the run's own files say. The exports of weights/hf.py and weights/peft.py write it beside
the weights, as README.md. All text from the run goes through `escaped`: a run's name may be
hostile.

Left out is what tells of the machine and not of the model: names of hosts, paths of folders.
"""

import html
import re
import statistics
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import checkpoint
import config
import flops
import program
from config import MPTConfig, TrainConfig
from launch import parser
from lifecycle import plot, runlog
from program import UserError, require
from storage import files
from weights.hf_config import lost_in_transformers

# Settings that name places on the machine where the run was, or change nothing in the model.
NO_FACTS = "run_dir data_dir data_cache data_cache_gb remote track expect timeout_minutes".split()
NO_RESULTS = {"config.json", "lease.json", "tokenizer.json", "microbatch.json"}
LARGEST = 2**24  # bytes of a file that is read here
MEASURES = {"foundry": "accuracy", "acc": "accuracy", "nats_per_token": "nats per token"}
PICTURE = "loss.png"
USAGE = {  # how others load the exported folder
    "transformers": 'transformers.AutoModelForCausalLM.from_pretrained("FOLDER")',
    "peft": 'peft.PeftModel.from_pretrained(base, "FOLDER")',
}

# --------------------------------------------------------------------------------------------------
# Scores


def scores_of(tasks: dict) -> dict[str, dict]:
    """{task: score, baseline, n, stderr, measure} of the figures of evaluation/figures.py.

    The score is the accuracy by LLM Foundry's rule, else `acc`, else nats per token, of which less
    is better. The baseline is the better one of chance and the most frequent answer.
    """
    scores = {}
    for task, figures in tasks.items():
        figures = figures if isinstance(figures, dict) else {}
        key = next((key for key in MEASURES if is_finite(figures.get(key))), None)
        if key is None:
            continue
        guesses = [figures.get(name) for name in ("chance", "majority")]
        n, stderr = figures.get("n"), figures.get(f"{key}_stderr")
        scores[task] = {
            "score": figures[key],
            "baseline": max(filter(is_finite, guesses), default=None),
            "n": n if files.has_type(n, int) else None,
            "stderr": stderr if is_finite(stderr) else None,
            "measure": MEASURES[key],
        }
    return scores


def is_finite(value) -> bool:
    """Is a value of JSON a number that fp32 can hold?"""
    return files.has_type(value, float) and abs(value) < 3.4e38


def is_result(name: str) -> bool:
    """Could a file of a run folder be one that `python -m evaluation --out` has written?"""
    return name.endswith(".json") and name not in NO_RESULTS


def results_of(path: Path) -> dict[str, dict]:
    """The scores in a file of results, none if it is none."""
    with suppress(UserError, OSError):
        tasks = files.parse_json(content_of(path), path.name).get("tasks")
        return scores_of(tasks) if isinstance(tasks, dict) else {}
    return {}


# --------------------------------------------------------------------------------------------------
# What the run's files say


class Record(NamedTuple):
    """What a card needs of metrics.jsonl."""

    rows: list[tuple]  # of its table
    scores: dict  # {task: as of `scores_of`}


def record_of(run_dir: Path) -> Record:
    """The record of a run; an empty one if it has no metrics. OSError if they cannot be read."""
    scores = {}
    for path in sorted(run_dir.glob("*.json")):
        scores |= results_of(path) if is_result(path.name) else {}
    try:
        metrics = runlog.read_columns(run_dir, ("tokens_per_second", "mfu"))
    except UserError:
        return Record([], scores)
    problem = metrics.problem(Path("metrics.jsonl"))
    return record(metrics, scores_of(metrics.tasks) | scores, problem)


def record(metrics: runlog.Metrics, scores: dict, problem: str | None) -> Record:
    """The record of metrics that have been read. problem: what is wrong with their file."""
    rows = []
    losses = zip(metrics.steps["step"], metrics.steps["loss"], strict=True)
    if trained := [(step, loss) for step, loss in losses if is_finite(loss)]:
        step, loss = trained[-1]
        rows.append(("Training loss", f"{loss:.4f} nats per token at step {step:,}"))
    if vals := [value for value in metrics.validation()[1] if is_finite(value)]:
        rows.append(("Validation loss", f"{vals[0]:.4f} at first, {vals[-1]:.4f} at last"))
    for name, form in {"tokens_per_second": ",.0f", "mfu": ".1%"}.items():
        if values := list(filter(is_finite, metrics.steps[name])):
            rows.append((plot.WHAT[name][0], f"{statistics.median(values):{form}} (median)"))
    return Record([*rows, ("Damage", problem)] if problem else rows, scores)


def content_of(path: Path) -> bytes:
    """What is in a small file of a run. UserError if it is a link or large, OSError."""
    require(not path.is_symlink(), f"{path.name} is a link, which is not followed here")
    return files.read_bytes(path, LARGEST)


def settings_of(run_dir: Path) -> dict:
    """The settings of a run, if imported of its checkpoint. UserError if there are none."""
    path = run_dir / "config.json"
    newest = checkpoint.latest(run_dir)
    if not path.exists() and newest:
        path = newest / "meta.json"
    require(path.exists(), f"{run_dir} is no run folder: it has no config.json")
    return parser.rename_keys(files.parse_json(content_of(path), path.name))


def launches_of(run_dir: Path) -> list[dict]:
    """The launches of a run, none if there is no such file. UserError or OSError if damaged."""
    path = run_dir / "launches.jsonl"
    if not path.exists():
        return []
    content_of(path)  # no link, and not large
    return runlog.read_launches(run_dir)


# --------------------------------------------------------------------------------------------------
# Markdown


def escaped(value) -> str:
    """A value as text of Markdown, on one line, at most 500 characters, without HTML.

    Of a path that begins at the root only the end is left.
    """
    text = f"{value:g}" if isinstance(value, float) else str(value)
    parts = re.split(r"([\s;,'\"=(]+)", text)
    text = "".join(last_part(part) if part.startswith("/") else part for part in parts)[:500]
    text = re.sub("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]", "\ufffd", text)
    words = re.sub(r"([\\`*\[\]|~$])", r"\\\1", text)
    return html.escape(words, quote=False)


def last_part(path: str) -> str:
    """The end of a path: /home/anna/runs/demo/checkpoints/step-9 -> demo, step-9."""
    parts = [part for part in Path(path).parts if part != "checkpoints"]
    is_step = len(parts) > 1 and re.fullmatch(r"step-\d+", parts[-1])
    return ", ".join(parts[-2:]) if is_step else parts[-1]


def table(head: tuple, rows: list[tuple]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --------------------------------------------------------------------------------------------------
# The card


def page(
    run_dir: Path, name: str, record: Record, step: int | None = None, picture: str = ""
) -> str:
    """The card. name: of the model. step: of the weights beside it; None: of the newest.

    picture: the file of the loss curve. UserError if the run has no settings.
    """
    settings = settings_of(run_dir)
    model = None
    with suppress(UserError):
        known = {field.name for field in fields(MPTConfig)} & settings.keys()
        model = config.from_dict(MPTConfig, {key: settings[key] for key in known})
    is_adapter = bool(settings.get("lora_rank"))
    library = "peft" if is_adapter else "transformers"
    parts = [
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [mpt]\n---",
        f"# {escaped(name)}",
        "Adapters (LoRA) for an MPT model." if is_adapter else "An MPT language model.",
        f"![Loss over the steps of training]({picture})" if picture else "",
        "## Training",
        table(("", ""), facts(run_dir, settings, model, step) + record.rows),
    ]
    if record.scores:
        parts += ["## Evaluation", score_table(record.scores)]
    if is_adapter or (model and not lost_in_transformers(model)):
        parts += ["## Use", f"```python\n{USAGE[library]}\n```"]
    usual = vars(MPTConfig()) | vars(TrainConfig())
    changed = [
        (key, value)
        for key, value in settings.items()
        if key not in NO_FACTS and value != usual.get(key)
    ]
    parts += ["## Settings", "All others are at their defaults.", table(("", ""), changed)]
    return "\n\n".join(part for part in parts if part) + "\n"


def facts(run_dir: Path, settings: dict, model: MPTConfig | None, step) -> list[tuple]:
    """What was trained, on what, and on which machine at last."""
    launch = {}
    with suppress(UserError, OSError):
        launch = [{}, *launches_of(run_dir)][-1]
    is_imported = str(settings.get("data_fingerprint")).startswith("imported from ")
    data = "; ".join(settings.get("mix") or []) or settings.get("dataset")
    rows = [
        ("Parameters", model and f"{flops.n_params(model):,}"),
        ("Base of the adapters", settings.get("lora_rank") and settings.get("init_from")),
        ("Weights", step is not None and f"of step {step:,}"),
        ("Data", "" if is_imported else data),
        ("Tokenizer", settings.get("tokenizer")),
        ("Ranks", launch.get("ranks")),
        ("Device", launch.get("device")),
        ("torch", launch.get("torch")),
        ("Precision", launch.get("precision")),
    ]
    return [row for row in rows if row[1]]


def score_table(scores: dict) -> str:
    """Scores beside what guessing would reach."""
    rows = []
    for task, score in scores.items():
        error = "" if score["stderr"] is None else f" ± {score['stderr']:.3f}"
        guess = "" if score["baseline"] is None else f"{score['baseline']:.3f}"
        n = "" if score["n"] is None else score["n"]
        rows.append((task, f"{score['score']:.4f}{error}", score["measure"], guess, n))
    return table(("Task", "Score", "Measure", "Baseline", "Items"), rows)


# --------------------------------------------------------------------------------------------------
# Files


def write_beside(folder: Path, path: Path) -> None:
    """Write the card of a checkpoint's run beside its exported weights, if the run is there."""
    run_dir = path.absolute().parent.parent
    with suppress(UserError):
        write(folder / "README.md", run_dir, checkpoint.number(path))


def write(out: Path, run_dir: Path, step: int | None = None) -> None:
    """Write the card and, if there is a loss to draw with matplotlib, its picture beside it."""
    name, picture = run_dir.resolve().name, ""
    settings_of(run_dir)  # UserError before the picture
    with suppress(UserError):
        run = replace(plot.read(str(run_dir)), folder=name)  # the legend shows no path
        picture = PICTURE * plot.as_picture([run], out.parent / PICTURE)
    text = page(run_dir, name, record_of(run_dir), step, picture)
    files.write_atomically(out, text.encode())


@dataclass
class CardSettings:
    """Where the card goes."""

    out: str = ""  # the file (empty = card.md in the run folder)


def main(argv) -> None:
    """Write the card of a run."""
    (run,), cfg = config.load(argv, CardSettings, takes="RUN")
    require(Path(run).is_dir(), f"no run folder {run!r}")
    out = Path(cfg.out or Path(run) / "card.md")
    require(out.suffix == ".md", f"--out={out} is no Markdown file: name it CARD.md")
    write(out, Path(run))
    print(out)


if __name__ == "__main__":
    program.run(main)

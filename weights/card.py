"""The model card of a run: one HTML file that says what was trained, on what, and how well.

    python -m weights.card runs/demo                 writes runs/demo/card.html
    python -m weights.card runs/demo --out=my.html

It says what the run's own files say: settings, curve, data, evaluation, on which machines it was
measured, and of adapters their base. The exports of weights/hf.py and weights/peft.py write it
beside the weights. The file needs no other file and holds no script; the curve is an SVG written by
hand. All text from the run goes through `Html`, which escapes it: a run's name may be hostile.

Left out is what tells of the machine and not of the model: names of hosts, paths of folders.
"""

import html
import re
import statistics
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import checkpoint
import config
import flops
import program
from config import MPTConfig, TrainConfig
from lifecycle import plot, runlog
from program import UserError, require
from storage import files

POINTS = 400  # of the curve
WIDTH, HEIGHT = 760, 300  # of the picture
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 26, 34  # its margins
# Settings that name places on the machine where the run was, or change nothing in the model.
NO_FACTS = "run_dir data_dir data_cache data_cache_gb remote track expect timeout_minutes".split()
SHAPE = ("n_layers", "d_model", "n_heads")
NO_RESULTS = {"config.json", "lease.json", "tokenizer.json", "microbatch.json"}
LARGEST = 2**24  # bytes of a file that is read here
MEASURES = {"foundry": "accuracy", "acc": "accuracy", "nats_per_token": "nats per token"}
STYLE = """
:root { color-scheme: light dark; --line: #8884; --train: #2563b0; --val: #b4520a; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
section { overflow-x: auto; } h1, td, [scope=row] { overflow-wrap: anywhere; min-width: 3.5rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; }
tr { border-bottom: 1px solid var(--line); }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: currentColor; }
.axis { stroke: var(--line); } .train { fill: none; stroke: var(--train); stroke-width: 1.5; }
.between { fill: var(--train); fill-opacity: .2; } .val { fill: none; stroke: var(--val); }
.dot { fill: var(--val); } .restart { stroke: currentColor; stroke-dasharray: 2 4; }
.of-train { fill: var(--train); } .of-val { fill: var(--val); }
@media (prefers-color-scheme: dark) { :root { --train: #7db2f0; --val: #f0a35e; } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


# --------------------------------------------------------------------------------------------------
# HTML


class Html(str):
    """Text that is HTML already. All other text is escaped where it is put in."""


def escaped(value) -> Html:
    """A value as text of a page. What no page may hold, such as a NUL, becomes a question mark."""
    if isinstance(value, Html):
        return value
    text = re.sub(
        "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", str(value)
    )
    return Html(html.escape(text))


def tag(name: str, *children, **attributes) -> Html:
    """An element: tag("td", "5 < 6", class_="a") is <td class="a">5 &lt; 6</td>."""
    words = [f' {key.rstrip("_")}="{escaped(value)}"' for key, value in attributes.items()]
    return Html(f"<{name}{''.join(words)}>{''.join(map(escaped, children))}</{name}>")


def table(rows: list[tuple], head: tuple = ()) -> Html:
    """A table. The first cell of a row is its heading."""
    lines = [tag("tr", *(tag("th", cell, scope="col") for cell in head))] if head else []
    for first, *others in rows:
        cells = [tag("td", cell) for cell in others]
        lines.append(tag("tr", tag("th", first, scope="row"), *cells))
    return tag("table", *lines)


def section(title: str, *children) -> Html:
    """A part of the page with its title; nothing if it has no content."""
    present = [child for child in children if child]
    return tag("section", tag("h2", title), *present) if present else Html("")


# --------------------------------------------------------------------------------------------------
# What the run's files say


@dataclass
class Record:
    """What a card needs of metrics.jsonl."""

    train: tuple = ((), (), (), ())  # x, low, mean, high of the loss, as of plot.envelope
    val: tuple = ((), ())  # x, y of the validation loss
    tokens_per_second: float | None = None  # of all devices, median
    mfu: float | None = None  # median, 0 to 1
    scores: dict = field(default_factory=dict)  # {task: as of `scores_of`}
    problem: str | None = None  # what is wrong with the file


def record_of(run_dir: Path) -> Record:
    """The record of a run; an empty one if it has no metrics. OSError if they cannot be read."""
    try:
        metrics = runlog.read_columns(run_dir, ("tokens_per_second", "mfu"))
    except UserError:
        return Record(scores=results_in(run_dir))
    scores = scores_of(metrics.tasks) | results_in(run_dir)
    return record(metrics, scores, metrics.problem(Path("metrics.jsonl")))


def record(metrics: runlog.Metrics, scores: dict, problem: str | None) -> Record:
    """The record of metrics that have been read."""
    x, _, y, _ = plot.envelope(*metrics.validation(), POINTS)
    return Record(
        train=plot.envelope(metrics.steps["step"], metrics.steps["loss"], POINTS),
        val=(x, y),
        tokens_per_second=median(metrics.steps["tokens_per_second"]),
        mfu=median(metrics.steps["mfu"]),
        scores=scores,
        problem=problem,
    )


def median(values) -> float | None:
    """The median of the finite values; None if there are none."""
    finite = list(filter(is_finite, values))
    return statistics.median(finite) if finite else None


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


def results_in(run_dir: Path) -> dict[str, dict]:
    """The scores in the files of results in a run folder."""
    scores = {}
    for path in sorted(Path(run_dir).glob("*.json")):
        if is_result(path.name):
            scores |= results_of(path)
    return scores


def results_of(path: Path) -> dict[str, dict]:
    """The scores in a file of results, none if it is none."""
    with suppress(UserError, OSError):
        tasks = files.parse_json(content_of(path), path.name).get("tasks")
        return scores_of(tasks) if isinstance(tasks, dict) else {}
    return {}


def content_of(path: Path) -> bytes:
    """What is in a small file of a run. UserError if it is a link or large, OSError."""
    require(not path.is_symlink(), f"{path.name} is a link, which is not followed here")
    return files.read_bytes(path, LARGEST)


def settings_of(run_dir: Path) -> dict:
    """The settings of a run, if imported of its checkpoint. UserError if there are none."""
    path = Path(run_dir) / "config.json"
    newest = checkpoint.latest(run_dir)
    if not path.exists() and newest:
        path = newest / "meta.json"
    require(path.exists(), f"{run_dir} is no run folder: it has no config.json")
    return config.renamed(files.parse_json(content_of(path), path.name))


def base_of(run_dir: Path) -> dict:
    """What the newest checkpoint says of the base of its adapters, if it can be read."""
    with suppress(UserError, OSError):
        newest = checkpoint.latest(run_dir)
        return checkpoint.read_meta(newest) if newest else {}
    return {}


def launches_of(run_dir: Path) -> list[dict]:
    """The launches of a run, none if there is no such file. UserError or OSError if damaged."""
    path = Path(run_dir) / "launches.jsonl"
    if not path.exists():
        return []
    content_of(path)  # no link, and not large
    return runlog.read_launches(run_dir)


def restarts_of(run_dir: Path, last: int) -> list[tuple[int, str]]:
    """(step, label) of the restarts before the last step, as far as they can be read."""
    with suppress(UserError, OSError):
        launches_of(run_dir)
        labels = plot.restart_labels(str(run_dir))
        return [(step, label) for step, label in labels.items() if 0 < step < last]
    return []


# --------------------------------------------------------------------------------------------------
# The card


def page(run_dir: Path, name: str, record: Record, step: int | None = None) -> str:
    """The card as HTML. name: of the model. step: of the weights beside it; None: of the newest.

    UserError if the run has no settings.
    """
    settings = settings_of(run_dir)
    launches = []
    with suppress(UserError, OSError):
        launches = launches_of(run_dir)
    x = record.train[0]
    restarts = restarts_of(run_dir, x[-1]) if x else []
    parts = [
        tag("h1", name),
        tag("p", kind_of(settings)),
        section("Facts", table(facts(settings, record, step))),
        section("Loss", picture(record, restarts)),
        section("Base", base_table(settings, base_of(run_dir))),
        section("Data", table(data_facts(settings, launches))),
        section("Evaluation", score_table(record.scores)),
        section("Measured on", machine_table(launches, record)),
        section("Settings", *settings_tables(settings)),
        section("Damage", record.problem),
    ]
    policy = Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">')
    head = [
        Html('<meta charset="utf-8">'),
        policy,
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", f"Model card: {name}"),
        tag("style", Html(STYLE)),
    ]
    document = tag("html", tag("head", *head), tag("body", tag("main", *parts)), lang="en")
    return f"<!doctype html>\n{document}\n"


def kind_of(settings: dict) -> str:
    """The model in a sentence."""
    size = ""
    with suppress(UserError):
        known = {field.name: field.type for field in fields(MPTConfig)}
        model = {key: value for key, value in settings.items() if key in known}
        n_params = flops.n_params(config.from_dict(MPTConfig, model))
        size = f" of {n_params:,} parameters"
    if rank := settings.get("lora_rank"):
        return f"Adapters (LoRA) of rank {rank} for an MPT language model{size}."
    return f"An MPT language model{size}."


def facts(settings: dict, record: Record, step: int | None) -> list[tuple]:
    """What was trained, and what came of it."""
    x, _, mean, _ = record.train
    rows = [
        ("Layers, width, heads", " · ".join(shown(settings.get(name)) for name in SHAPE)),
        ("Context", f"{shown(settings.get('max_seq_len'))} tokens"),
    ]
    if step is not None:
        rows.append(("Weights", f"of step {step:,}"))
    if x:
        rows.append(("Steps", f"{x[-1]:,} of {shown(settings.get('max_steps'))} planned"))
        rows.append(("Training loss", f"{mean[-1]:.4f} nats per token at the end"))
    if record.val[0]:
        first, last = record.val[1][0], record.val[1][-1]
        rows.append(("Validation loss", f"{first:.4f} at first, {last:.4f} nats per token at last"))
    if settings.get("expect"):
        rows.append(("Expected", settings["expect"]))
    return rows


def shown(value) -> str:
    """A setting as text. Of a path that begins at the root, only the end. No setting is nested."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "not set"}[value]
    if isinstance(value, int) and abs(value) < 10**300:  # a larger one is no float
        return str(value) if abs(value) < 10**15 else f"{value:.4g}"
    if isinstance(value, list):
        parts = ["..." if isinstance(part, list) else shown(part) for part in value]
        return "; ".join(parts)[:1000]
    if isinstance(value, dict):
        return "..."
    if isinstance(value, str):
        words = [last_part(word) if word.startswith("/") else word for word in value.split(" ")]
        return " ".join(words)[:500]
    return f"{value:g}" if isinstance(value, float) else str(value)[:500]


def base_table(settings: dict, meta: dict) -> Html:
    """What adapters belong to, or a finetuned model began with; nothing if it began at random."""
    start = settings.get("init_from")
    if not start:
        return Html("")
    rows = [("Began with", last_part(start))]
    if base := meta.get("base"):
        rows.append(("Base of the adapters", last_part(base)))
    if fingerprint := meta.get("base_fingerprint"):
        rows.append(("Fingerprint of its weights", fingerprint))
    return table(rows)


def last_part(path) -> str:
    """The end of a path: /home/anna/runs/demo/checkpoints/step-9 -> demo, step-9."""
    parts = [part for part in Path(str(path)).parts if part != "checkpoints"]
    is_step = len(parts) > 1 and re.fullmatch(r"step-\d+", parts[-1])
    return ", ".join(parts[-2:]) if is_step else parts[-1] if parts else str(path)


def data_facts(settings: dict, launches: list[dict]) -> list[tuple]:
    """What it was trained on."""
    names = ["mix"] if settings.get("mix") else ["dataset"]
    names += ["tokenizer", "val_fraction", "data_format", "max_tokens"]
    rows = [(name, shown(settings[name])) for name in names if name in settings]
    n_tokens = launches[-1].get("epoch_tokens") if launches else 0
    if n_tokens:
        rows.append(("tokens of an epoch", f"{n_tokens:,}"))
    return rows


def score_table(scores: dict) -> Html:
    """Scores beside what guessing would reach, or of adapters their base."""
    if not scores:
        return Html("")
    rows = []
    for task, score in scores.items():
        error = f" ± {score['stderr']:.3f}" if score["stderr"] is not None else ""
        guess = "" if score["baseline"] is None else f"{score['baseline']:.3f}"
        n = "" if score["n"] is None else f"{score['n']:,}"
        rows.append((task, f"{score['score']:.4f}{error}", score["measure"], guess, n))
    return table(rows, ("Task", "Score", "Measure", "Baseline", "Items"))


def machine_table(launches: list[dict], record: Record) -> Html:
    """The devices, versions and speed."""
    rows = []
    for launch in launches[-20:]:
        libraries = {"torch": "torch", "cuda": "CUDA", "rocm": "ROCm"}
        versions = [f"{libraries[key]} {launch[key]}" for key in libraries if launch.get(key)]
        where = f"{shown(launch.get('ranks'))} × {shown(launch.get('device'))}"
        row = where, shown(launch.get("precision")), ", ".join(versions), shown(launch.get("time"))
        rows.append((f"from step {launch.get('first_step', 0):,}", *row))
    speed = Html("")
    if record.tokens_per_second is not None:
        mfu = "" if record.mfu is None else f", MFU {record.mfu:.1%}"
        speed = tag("p", f"{record.tokens_per_second:,.0f} tokens/s{mfu} (medians of the steps)")
    head = ("Launch", "Ranks × device", "Precision", "Versions", "Time")
    return Html(speed + (table(rows, head) if rows else ""))


def settings_tables(settings: dict) -> list[Html]:
    """The settings that are not as by default, then all."""
    usual = vars(MPTConfig()) | vars(TrainConfig())
    rows = [(key, shown(value)) for key, value in settings.items() if key not in NO_FACTS]
    changed = [row for row in rows if settings[row[0]] != usual.get(row[0])]
    rest = [row for row in rows if row not in changed]
    others = tag("details", tag("summary", "Settings left at their default"), table(rest))
    return [table(changed) if changed else "", others if rest else ""]


# --------------------------------------------------------------------------------------------------
# The curve


def picture(record: Record, restarts: list[tuple[int, str]]) -> Html:
    """The losses as an SVG: the mean with the range around it, validation, dotted restarts."""
    x, low, mean, high = record.train
    val_x, val_y = record.val
    if not x and not val_x:
        return Html("")
    axes = Axes(max([*x, *val_x, 1]), min([*low, *val_y]), max([*high, *val_y]))
    parts = [tag("title", "Loss over the steps of training"), *axes.drawn()]
    for step, label in restarts[:100]:
        place = axes.across(step)
        title = tag("title", f"restart after step {step:,}: {label}")
        parts.append(line("restart", place, TOP, place, HEIGHT - BOTTOM, title))
    if x:
        around = f"{axes.points(x, high)} {axes.points(x[::-1], low[::-1])}"
        parts.append(tag("polygon", class_="between", points=around))
        parts.append(tag("polyline", class_="train", points=axes.points(x, mean)))
    parts.append(tag("polyline", class_="val", points=axes.points(val_x, val_y)))
    for step, value in zip(val_x, val_y, strict=True):
        cx, cy = f"{axes.across(step):.1f}", f"{axes.up(value):.1f}"
        parts.append(tag("circle", class_="dot", r=2, cx=cx, cy=cy))
    parts.append(tag("text", "training", x=LEFT, y=14, class_="of-train"))
    if val_x:
        parts.append(tag("text", "validation", x=LEFT + 70, y=14, class_="of-val"))
    box = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": "Loss curve"}
    return tag("svg", *parts, **box)


def line(class_: str, x1: float, y1: float, x2: float, y2: float, *children) -> Html:
    """A line of the picture."""
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    return tag("line", *children, class_=class_, **ends)


@dataclass(frozen=True)
class Axes:
    """Where a step and a loss are in the picture."""

    right: float  # the last step
    bottom: float  # the lowest loss
    top: float  # the highest

    def across(self, step: float) -> float:
        """x of a step."""
        return LEFT + step / self.right * (WIDTH - LEFT - RIGHT)

    def up(self, value: float) -> float:
        """y of a loss."""
        span = (self.top - self.bottom) or 1.0
        return TOP + (self.top - value) / span * (HEIGHT - TOP - BOTTOM)

    def points(self, steps, values) -> str:
        """The points of a line."""
        pairs = zip(steps, values, strict=True)
        return " ".join(f"{self.across(step):.1f},{self.up(value):.1f}" for step, value in pairs)

    def drawn(self) -> list[Html]:
        """Five lines across with their losses, and five steps below."""
        parts = []
        for i, anchor in enumerate(["start", "middle", "middle", "middle", "end"]):
            value = self.bottom + (self.top - self.bottom) * i / 4
            height = self.up(value)
            parts.append(line("axis", LEFT, height, WIDTH - RIGHT, height))
            spot = {"x": LEFT - 6, "y": f"{height + 4:.1f}", "text-anchor": "end"}
            parts.append(tag("text", f"{value:.4g}", **spot))
            step = round(self.right * i / 4)
            spot = {"x": f"{self.across(step):.1f}", "y": HEIGHT - 12, "text-anchor": anchor}
            parts.append(tag("text", f"{step:,}" + " steps" * (i == 4), **spot))
        return parts


# --------------------------------------------------------------------------------------------------
# Files


def write_beside(folder: Path, path: Path) -> None:
    """Write the card of a checkpoint's run beside its exported weights, if the run is there."""
    run_dir = path.absolute().parent.parent
    with suppress(UserError):
        text = page(run_dir, run_dir.name, record_of(run_dir), checkpoint.number(path))
        (folder / "card.html").write_bytes(text.encode(errors="replace"))


@dataclass
class CardSettings:
    """Where the card goes."""

    out: str = ""  # the file (empty = card.html in the run folder)


def main(argv) -> None:
    """Write the card of a run."""
    (run,), cfg = config.load(argv, CardSettings, takes="RUN")
    run_dir = Path(run)
    require(run_dir.is_dir(), f"no run folder {run!r}")
    out = Path(cfg.out or run_dir / "card.html")
    text = page(run_dir, run_dir.resolve().name, record_of(run_dir))
    files.write_atomically(out, text.encode(errors="replace"))
    print(out)


if __name__ == "__main__":
    program.run(main)

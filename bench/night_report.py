"""The page of a night on a GPU: FOLDER/README.md, from what `bench first_night` left in the folder.

    python -m bench night_report first-night

It has the machine, what each stage came to and its command, and the measured training and decoding
beside the planner's predictions: tokens/s by planning/step_time.py, memory by planning/memory.py,
the limit of decoding by planning/decode_time.py. A prediction is n/a for a device that devices.py
does not know, and so on a CPU.
"""

import contextlib
import re
from pathlib import Path

import config
import devices
from bench.compare import markdown
from config import UserError, require
from planning import calibrate, memory, step_time
from planning.fleet import Fleet
from storage import files

UNKNOWN = "n/a"
STATE = {"number": int, "stage": str, "status": str, "seconds": float, "command": str}


def read_states(folder: Path) -> list[dict]:
    """The state of each stage that the night has come to, in order. UserError if one is damaged."""
    paths = (folder / "stages").glob("*.json")
    states = [files.read_json(path, fields=STATE, fix="delete it") for path in paths]
    return sorted(states, key=lambda state: state["number"])


def missing_states(folder: Path) -> list[dict]:
    """The states of the stages that could run here, but are not done."""
    states = [state for state in read_states(folder) if state["status"] != "done"]
    return [state for state in states if not state["status"].startswith("not run")]


# --- Predictions


def predictions(row: dict, known_as: str | None) -> tuple[float | None, float | None]:
    """Tokens/s of all devices and peak GB of one, for a row of `bench train`; None: unknown.

    known_as: the name in devices.py of each of the devices.
    """
    device = next((device for device in devices.TABLE if device.name == known_as), None)
    if device is None:
        return None, None
    speed = peak = None
    ranks = int(row["ranks"])
    precision = row["precision"].split()[0]
    with contextlib.suppress(UserError):  # settings that the planner has no formula for
        m, cfg = calibrate.settings_of(row)
        peak = memory.bytes_by_part(m, cfg, ranks, precision)["peak"] / 1e9
        if precision == "bf16":
            speed = step_time.tokens_per_second(m, cfg, Fleet(device, ranks, ranks))
    return speed, peak


def number(text: str | float | None, form: str) -> str:
    """A figure in the form, n/a if there is none."""
    return UNKNOWN if text in (None, "") else format(float(text), form)


def training_cells(stage: str, row: dict, known_as: str | None) -> dict[str, str]:
    """A line of the table of training."""
    cells = {
        "stage": stage,
        "model": row["model"],
        "devices": row["ranks"],
        "microbatch": row["microbatch_size"],
        "compile": row["compile"],
        "recomputed": row["activation_checkpointing"],
    }
    if row["status"] != "ok":
        return cells | dict.fromkeys(FIGURES, "") | {"tokens/s": row["status"]}
    speed, peak = predictions(row, known_as)
    measured = float(row["tokens_per_second"])
    figures = [
        f"{measured:,.0f}",
        number(speed, ",.0f"),
        number(speed and measured / speed, ".2f"),
        number(row["mfu"], ".1%"),
        number(row["memory_gb"], ".1f"),
        number(peak, ".1f"),
    ]
    return cells | dict(zip(FIGURES, figures, strict=True))


FIGURES = ["tokens/s", "predicted", "ratio", "MFU", "peak GB", "predicted GB"]


def training_table(folder: Path, facts: dict) -> str:
    """All rows of `bench train` beside their predictions."""
    known_as = facts["gpus"][0]["known_as"] if facts["gpus"] else None
    lines = []
    for path in sorted(folder.glob("train-*.csv")):
        for row in files.read_csv(path, ("model", "status"), "a CSV of bench train"):
            lines.append(training_cells(path.stem, row, known_as))
    return markdown(lines) if lines else "Not measured."


def attention_tables(folder: Path) -> str:
    """The tables of `bench attention`, with their headings one level below the page's."""
    texts = [path.read_text() for path in sorted(folder.glob("attention_*.md"))]
    return re.sub(r"^#", "###", "\n".join(texts), flags=re.MULTILINE) or "Not measured."


def decoding_table(folder: Path) -> str:
    """The table of `bench generate`, whose last column is the limit."""
    path = folder / "generate.csv"
    return markdown(files.read_csv(path)) if path.exists() else "Not measured."


# --- The machine and the stages


def machine_lines(facts: dict, network: list[str]) -> list[str]:
    """What the machine is, a list."""
    gpus = [f"{gpu['name']} ({gpu['arch']}, {gpu['memory_gb']:.0f} GiB)" for gpu in facts["gpus"]]
    counts = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    known_as = {str(gpu["known_as"] or UNKNOWN) for gpu in facts["gpus"]}
    platform = f"ROCm {facts['rocm']}" if facts["amd"] else f"CUDA {facts['cuda'] or UNKNOWN}"
    library = "RCCL" if facts["amd"] else "NCCL"
    versions = f"torch {facts['torch']}, {platform}, driver {facts['driver'] or UNKNOWN}, "
    versions += f"Triton {facts['triton'] or UNKNOWN}, {library} {facts['nccl'] or UNKNOWN}"
    lines = [
        f"- devices: {', '.join(counts) or 'no GPU: a miniature on the CPU, without meaning'}",
        f"- in devices.py: {', '.join(known_as) or UNKNOWN}",
        f"- {versions}",
        f"- Python {facts['python']}, {facts['platform']}, {facts['cpus']} CPU cores",
        f"- date: {facts['time']}",
    ]
    return lines + [f"- network: {line}" for line in network]


def network_lines(folder: Path) -> list[str]:
    """What NCCL or RCCL said of its network and plug-ins, each line once."""
    path = folder / "stages" / "network.log"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"(?:NCCL|RCCL) INFO (.*(?:NET/|[Nn]etwork|plugin).*)", text)
    return list(dict.fromkeys(line.strip()[:150] for line in found))[:12]


def stage_cells(state: dict) -> dict[str, str]:
    """A line of the table of stages."""
    return {
        "stage": state["stage"],
        "status": state["status"],
        "seconds": f"{state['seconds']:.0f}",
        "command": f"`{state['command']}`",
    }


PAGE = """# The first night of {devices}

{machine}

{stages}

{summary}

What a stage printed is in `stages/NAME.log`; tables and pictures lie beside this page.

## Training, measured and predicted

All devices together; random tokens, the median of several turns. The planner (planning/step_time.py
and planning/memory.py) does not know of compilation. A ratio above 1: faster than predicted.

{training}

## Attention

{attention}

## Decoding

{decoding}

## Send it

Look through the folder first: logs have the name of the host and paths. Then pack it, open an issue
in this project's repository on GitHub, and attach it:

    {pack}
"""


def summary(folder: Path) -> str:
    """How many stages are done, and which are not, with the last lines that those printed."""
    done = sum(state["status"] == "done" for state in read_states(folder))
    missing = missing_states(folder)
    names = ", ".join(f"{state['stage']} ({state['status']})" for state in missing)
    counts = f"Done: {done} of {done + len(missing)} stages that can run here"
    parts = [f"{counts}. Not done: {names}." if missing else f"{counts}."]
    for state in missing:
        path = folder / "stages" / f"{state['stage']}.log"
        if path.exists():
            last_lines = "\n".join(path.read_text(errors="replace").strip().splitlines()[-30:])
            parts.append(f"The end of {state['stage']}:\n\n```\n{last_lines}\n```")
    return "\n\n".join(parts)


def readable(table, *args) -> str:
    """`table(*args)`; or what is wrong, since one damaged file must not end the night."""
    try:
        return table(*args)
    except (UserError, OSError, KeyError, ValueError) as error:
        return f"n/a: {config.one_line(error)}"


def write(folder: Path) -> None:
    """Write FOLDER/README.md. Raises UserError if facts.json or a state is missing or damaged."""
    facts = files.read_json(folder / "facts.json")
    states = read_states(folder)
    parent, name = map(config.shell, (folder.resolve().parent, folder.name))
    page = PAGE.format(
        devices=", ".join(dict.fromkeys(gpu["name"] for gpu in facts["gpus"])) or "a CPU",
        machine="\n".join(machine_lines(facts, network_lines(folder))),
        summary=readable(summary, folder),
        stages=markdown([stage_cells(state) for state in states]),
        training=readable(training_table, folder, facts),
        attention=readable(attention_tables, folder),
        decoding=readable(decoding_table, folder),
        pack=f"tar czf {name}.tar.gz -C {parent} {name}",
    )
    files.write_atomically(folder / "README.md", page.encode())


def main(argv: list[str]) -> None:
    """Write the page again."""
    (folder,) = config.arguments(argv, "FOLDER")
    require(Path(folder, "facts.json").is_file(), f"no facts.json in {folder}: is it a night's?")
    write(Path(folder))
    print(f"written: {folder}/README.md")


if __name__ == "__main__":
    config.run(main)

"""The page of a night on a GPU: FOLDER/README.md, from what `bench first_night` left in the folder.

It has the machine, what each stage came to and its command, and the measured training and decoding
beside the planner's predictions: tokens/s by planning/step_time.py, memory by planning/memory.py,
the limit of decoding by planning/decode_time.py. A prediction is n/a for a device that devices.py
does not know, and so on a CPU.

    facts.json    gpus: [{"name", "arch" (9.0, gfx90a), "memory_gb" (GiB), "known_as": its row of
                  devices.py or null}, ...], computes_in_bf16, amd (torch is built for ROCm),
                  triton, nccl (or RCCL): versions, and what runlog.versions has
"""

import contextlib
import importlib.metadata
from pathlib import Path

import torch

import config
import devices
import program
from bench.compare import markdown
from config import MPTConfig, TrainConfig
from lifecycle import runlog
from planning import calibrate, memory, step_time
from planning.fleet import Fleet
from program import UserError
from storage import files

UNKNOWN = "n/a"


# --- The machine

STATE = {"number": int, "stage": str, "status": str, "seconds": float, "command": str}


def facts() -> dict:
    """The contents of facts.json."""
    found = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    has_nccl = torch.distributed.is_nccl_available()
    packages = importlib.metadata.packages_distributions().get("triton", [])
    return {
        "gpus": [gpu(device) for device in found],
        "computes_in_bf16": bool(found) and all(map(devices.computes_in_bf16, found)),
        "amd": torch.version.hip is not None,
        "triton": importlib.metadata.version(packages[0]) if packages else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        **runlog.versions(),
    }


def gpu(device: torch.device) -> dict:
    """What torch and devices.py know of one GPU."""
    properties = torch.cuda.get_device_properties(device)
    row = devices.identify(device)
    capability = f"{properties.major}.{properties.minor}"
    return {
        "name": properties.name,
        "arch": properties.gcnArchName if torch.version.hip else capability,
        "memory_gb": properties.total_memory / 2**30,
        "known_as": row and row.name,
    }


def machine_lines(found: dict) -> str:
    """A list of what the machine is."""
    gpus = [f"{gpu['name']} ({gpu['arch']}, {gpu['memory_gb']:.0f} GiB)" for gpu in found["gpus"]]
    counts = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    known_as = {str(gpu["known_as"] or UNKNOWN) for gpu in found["gpus"]}
    rows = {
        "devices": ", ".join(counts) or "no GPU: a miniature on the CPU, without meaning",
        "in devices.py": ", ".join(known_as) or UNKNOWN,
        "ROCm" if found["amd"] else "CUDA": found["rocm"] or found["cuda"],
        "RCCL" if found["amd"] else "NCCL": found["nccl"],
    }
    rows |= {name: found[name] for name in ("torch", "triton", "python", "platform")}
    rows["date"] = found["time"]
    return "\n".join(f"- {name}: {value or UNKNOWN}" for name, value in rows.items())


# --- The stages


def state_path(folder: Path, stage: str) -> Path:
    """The file that holds the state of a stage."""
    return folder / "stages" / f"{stage}.json"


def read_states(folder: Path) -> list[dict]:
    """The state of each stage that the night has come to, in order. UserError if one is damaged."""
    paths = (folder / "stages").glob("*.json")
    states = [files.read_json(path, fields=STATE, fix="delete it") for path in paths]
    return sorted(states, key=lambda state: state["number"])


def stages_table(folder: Path) -> str:
    """A line for each stage."""
    names = ("stage", "status", "seconds", "command")
    states = read_states(folder)
    return markdown([{name: state[name] for name in names} for state in states])


def summary(folder: Path) -> str:
    """How many stages are done, and which are not."""
    states = [state for state in read_states(folder) if not state["status"].startswith("not run")]
    missing = [state for state in states if state["status"] != "done"]
    names = ", ".join(f"{state['stage']} ({state['status']})" for state in missing)
    counts = f"Done: {len(states) - len(missing)} of {len(states)} stages that can run here"
    return f"{counts}. Not done: {names}." if missing else f"{counts}."


# --- Figures beside predictions


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
        m, cfg = config.load(calibrate.flags_of(row), MPTConfig, TrainConfig)
        peak = memory.bytes_by_part(m, cfg, ranks, precision)["peak"] / 1e9
        if precision == "bf16":
            speed = step_time.tokens_per_second(m, cfg, Fleet(device, ranks, ranks))
    return speed, peak


def number(text: str | float | None, form: str) -> str:
    """A figure in the form, n/a if there is none."""
    return UNKNOWN if text in (None, "") else format(float(text), form)


def training_cells(stage: str, row: dict, known_as: str | None) -> dict[str, str]:
    """A line of the table of training."""
    is_ok = row["status"] == "ok"
    speed, peak = predictions(row, known_as) if is_ok else (None, None)
    measured = float(row["tokens_per_second"]) if is_ok else None
    return {
        "stage": stage,
        "model": row["model"],
        "devices": row["ranks"],
        "microbatch": row["microbatch_size"],
        "compile": row["compile"],
        "recomputed": row["activation_checkpointing"],
        "tokens/s": number(measured, ",.0f") if is_ok else row["status"],
        "predicted": number(speed, ",.0f"),
        "ratio": number(speed and measured / speed, ".2f"),
        "MFU": number(row["mfu"], ".1%"),
        "peak GB": number(row["memory_gb"], ".1f"),
        "predicted GB": number(peak, ".1f"),
    }


def training_table(folder: Path, found: dict) -> str:
    """All rows of `bench train` beside their predictions."""
    known_as = found["gpus"][0]["known_as"] if found["gpus"] else None
    lines = []
    for path in sorted(folder.glob("train-*.csv")):
        for row in files.read_csv(path, ("model", "status"), "a CSV of bench train"):
            lines.append(training_cells(path.stem, row, known_as))
    return markdown(lines) if lines else "Not measured."


def attention_and_decoding(folder: Path) -> str:
    """The tables of `bench attention`, and that of `bench generate` with the limit beside it."""
    texts = [path.read_text() for path in sorted(folder.glob("attention_*.md"))]
    if (folder / "generate.csv").exists():
        texts.append(markdown(files.read_csv(folder / "generate.csv")))
    return "\n\n".join(texts) or "Not measured."


# --- The page

PAGE = """# The first night of {devices}

{machine}

{stages}

{summary}

What a stage printed is in `stages/NAME.log`; tables lie beside this page.

## Training, measured and predicted

All devices together; random tokens, the median of several turns. A ratio above 1: faster than
planning/step_time.py predicts. Memory is predicted by planning/memory.py.

{training}

## Attention and decoding

{kernels}

## Send it

Look through the folder first: logs have the name of the host and paths. Then pack it, open an issue
in this project's repository on GitHub, and attach it:

    {pack}
"""


def readable(table, *args) -> str:
    """`table(*args)`; or what is wrong, since one damaged file must not end the night."""
    try:
        return table(*args)
    except (UserError, OSError, KeyError, ValueError) as error:
        return f"n/a: {program.one_line(error)}"


def write(folder: Path) -> None:
    """Write FOLDER/README.md. Raises UserError if facts.json or a state is missing or damaged."""
    found = files.read_json(folder / "facts.json")
    parent, name = map(program.shell, (folder.resolve().parent, folder.name))
    page = PAGE.format(
        devices=", ".join(dict.fromkeys(gpu["name"] for gpu in found["gpus"])) or "a CPU",
        machine=machine_lines(found),
        stages=stages_table(folder),
        summary=summary(folder),
        training=readable(training_table, folder, found),
        kernels=readable(attention_and_decoding, folder),
        pack=f"tar czf {name}.tar.gz -C {parent} {name}",
    )
    files.write_atomically(folder / "README.md", page.encode())

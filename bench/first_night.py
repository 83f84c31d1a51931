"""The first night on a GPU: all that should be tested and measured there, in one resumable run.

    python -m bench first_night                   up to three hours; minutes on a CPU
    python -m bench first_night --stage=tests     one stage, again

The night has stages, each of which is a command that a person could type. A stage may take nine
minutes, since some machines are lent for ten. One that fails or takes too long does not stop the
others. Ctrl-C, or the end of the terminal, ends the night. The same command continues it, and skips
only the stages that are done. Training continues after its last row; other stages start anew, but
with the kernels that are compiled already.

    FOLDER/README.md            what to send: machine, stages, figures beside predictions
    FOLDER/facts.json           the machine, see bench/night_report.py
    FOLDER/stages/NAME.log      what the command of a stage printed
    FOLDER/stages/NAME.json     its seconds and status: done, failed, timed out, interrupted, not
                                reached, or not run and why
    FOLDER/...                  what the commands wrote: tables, machine.json

Some stages need a GPU, or two. Without a GPU the others run in miniature on the CPU, which shows
that the program works; those figures mean nothing.
"""

import contextlib
import datetime
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import config
import program
from bench import night_report
from config import MPTConfig, TrainConfig
from planning import memory
from processes import Pool, PoolError
from program import require
from storage import files

ROOT = Path(__file__).resolve().parent.parent
# Recipes, configs/mpt125m.py and so on; two again with ALiBi, and so with our attention kernel:
# heads of 64 and of 128.
TRAINED = "125m 350m 760m 1b 3b 7b 350m-alibi 1b-alibi".split()
ROWS = 64  # of a rank in a trial batch: no larger microbatch is tried
SHORT = "--grad_accum=2 --rounds=3 --steps=2"  # MPT-7B may take 7 s a step
GRACE = 10  # seconds between SIGTERM and SIGKILL
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # each ends the night and its command
STARTS_IN = 300  # seconds in which torch must have found out what this machine is
# Ranks on this machine, at a port of their own.
TORCHRUN = "python -m torch.distributed.run --standalone --nproc_per_node"
# Without a GPU: what makes the command of a stage small.
MINIATURE = {
    "tests": "tests/test_processes.py",
    "attention": "--lengths=64 --tokens=64 --d_model=64 --head_dims=32 --rounds=1 --turn_ms=1",
    "train-tiny": "--n_layers=1 --d_model=64 --n_heads=2 --max_seq_len=64 --global_batch_size=4"
    " --microbatch_size=4 --rounds=1 --steps=1",
    "generate": "1 --shapes=64x1 --turns=1",  # of one thread
    "machine": "--seconds=0.01",
}


@dataclass
class NightArgs:
    """What to run, and where the results go."""

    out: str = "first-night"  # folder of the results
    stage: str = ""  # only this stage, also if it is done (empty: all that are not)
    minutes: float = 9.0  # a stage that takes longer is ended
    device: Literal["auto", "cpu"] = "auto"  # cpu: the miniature, also where there is a GPU

    def check(self) -> None:
        """UserError if the results have no folder."""
        is_file = Path(self.out).exists() and not Path(self.out).is_dir()
        require(self.out and not is_file, f"--out={self.out}: give the name of a folder")


@dataclass(frozen=True)
class Stage:
    """A command with a time limit. lacks: why it cannot run on this machine, "" if it can."""

    name: str
    about: str
    command: str  # as typed in the root of the project
    lacks: str = ""


# --- Which stages there are


def stages_of(folder: Path, facts: dict) -> list[Stage]:
    """The stages in order. facts: of this machine."""
    gpus = len(facts["gpus"])
    no_gpu = "" if gpus else "needs a GPU"
    one_gpu = "needs two GPUs" if gpus == 1 else ""  # without a GPU: two ranks on the CPU
    out = program.shell(folder)
    tune = "python -m gpu_kernels.flash_attention"
    attention = f"python -m bench attention --out={out}"
    generate = f"python -m bench generate --out={out}/generate.csv"
    training = [
        Stage("train-tiny", "the step", f"python -m bench train --out={out}/train-tiny.csv")
    ]
    if gpus:
        attention += " --lengths=1024,2048,4096,8192"
        generate += " --shapes=768x12,2048x24"
        training = [training_stage(name, facts, out) for name in TRAINED]
    start = "python" if gpus == 1 else f"{TORCHRUN} {gpus or 2}"
    network = f"NCCL_DEBUG=INFO {TORCHRUN} 2 -m bench machine --out={out}/two.json"

    lost = "python -m lessons.lost_rank"
    stages = [
        Stage("tests", "tests that need a GPU", "python -m pytest -m gpu -vv -rfEs --durations=10"),
        Stage("tune-64", "launch settings, heads of 64", f"{tune} --tune=64", no_gpu),
        Stage("tune-128", "launch settings, heads of 128", f"{tune} --tune=128", no_gpu),
        Stage("attention", "ours and PyTorch's", attention),
        *training,
        Stage("generate", "decoding", generate),
        Stage("checkpoint", "staging and writing", "python checkpoint.py"),
        Stage("machine", "the links, too", f"{start} -m bench machine --out={out}/machine.json"),
        Stage("network", "what NCCL loads", f"{network} --seconds=0.05", no_gpu or one_gpu),
        Stage("killed-rank", "kill -9 of a rank", f"{lost} kill", one_gpu),
        Stage("hung-rank", "SIGSTOP of a rank", f"{lost} stop", one_gpu),
    ]
    if gpus:
        return stages
    commands = [f"{stage.command} {MINIATURE.get(stage.name, '')}".strip() for stage in stages]
    return [replace(stage, command=small) for stage, small in zip(stages, commands, strict=True)]


def training_stage(name: str, facts: dict, out: str) -> Stage:
    """The stage of one of TRAINED: two microbatches, eager and compiled."""
    size, _, positions = name.partition("-")
    recomputed, microbatch = what_fits(size, facts)
    lacks = "" if microbatch else "does not fit into memory, by planning/memory.py"
    halves = f"{microbatch // 2},{microbatch}" if microbatch > 1 else "1"
    command = f"python -m bench train --sizes={size} {SHORT}"
    command += " --alibi" * bool(positions)
    command += f" --activation_checkpointing={recomputed}"
    command += f' --sweep="microbatch_size={halves} compile=false,true"'
    return Stage(f"train-{name}", f"MPT-{name}", f"{command} --out={out}/train-{name}.csv", lacks)


def what_fits(size: str, facts: dict) -> tuple[str, int]:
    """Activation checkpointing and microbatch of a recipe on all GPUs: a power of two, 0 if none.

    Nothing is recomputed if a microbatch of 1 fits without that.
    """
    ranks = len(facts["gpus"])
    gpu_bytes = min(gpu["memory_gb"] for gpu in facts["gpus"]) * 2**30
    precision = "bf16" if facts["computes_in_bf16"] else "fp32"
    for mode in ("none", "full"):
        flags = [f"--activation_checkpointing={mode}", f"--global_batch_size={ROWS * ranks}"]
        recipe = str(ROOT / f"configs/mpt{size}.py")
        m, cfg = config.load([recipe, *flags], MPTConfig, TrainConfig)
        largest = memory.largest_microbatch(m, cfg, gpu_bytes, ranks, precision)
        if largest:
            return mode, 2 ** int(math.log2(largest))
    return mode, 0


# --- Running a command


def run(command: str, log, seconds: float, hidden: dict) -> int | None:
    """Run a command with its output to `log`; its exit status, None if it took too long.

    hidden: variables that hide the GPUs, or nothing. Whatever happens, Ctrl-C too, no process of
    the command is left.
    """
    process = subprocess.Popen(
        command.replace("python", shlex.quote(sys.executable), 1),
        shell=True,
        cwd=ROOT,
        env=os.environ | hidden | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a process group, which can be ended as a whole
    )
    try:
        return process.wait(max(0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(process)


def end_group(process: subprocess.Popen) -> None:
    """End a process and all that it has started, by SIGTERM and then SIGKILL.

    Another Ctrl-C meanwhile changes nothing.
    """
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDINGS}
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    for number, handler in handlers.items():
        signal.signal(number, handler)


# --- The night


def write_state(folder: Path, number: int, stage: Stage, status: str, seconds: float = 0.0) -> None:
    """Record what a stage came to."""
    state = {
        "number": number,
        "stage": stage.name,
        "status": status,
        "seconds": round(seconds, 1),
        "command": stage.command,
        "time": datetime.datetime.now().isoformat(timespec="seconds"),
    }
    path = night_report.state_path(folder, stage.name)
    files.write_atomically(path, json.dumps(state, indent=1).encode())


def run_stage(folder: Path, number: int, stage: Stage, minutes: float, hidden: dict) -> str:
    """Run a stage and record its state; returns its status."""
    write_state(folder, number, stage, "interrupted")  # if nothing else is written below
    begin = time.monotonic()
    with open(folder / "stages" / f"{stage.name}.log", "ab") as log:
        log.write(f"$ {stage.command}\n".encode())
        log.flush()
        code = run(stage.command, log, 60 * minutes, hidden)
        log.write(f"exit status: {code}\n\n".encode())
    seconds = time.monotonic() - begin
    status = {0: "done", None: "timed out"}.get(code, "failed")
    write_state(folder, number, stage, status, seconds)
    return f"{status} after {seconds:.0f} s"


def learn_facts(folder: Path, hidden: dict) -> dict:
    """The facts of this machine, from a process of its own: this one must not take a GPU's memory.

    UserError if torch does not start, or the folder is of other GPUs.
    """
    path = folder / "facts.json"
    try:
        pool = Pool(1, night_report.facts, environment=hidden)
        (facts,) = pool(dict, patience=STARTS_IN)
        pool.stop()
    except PoolError as error:
        raise program.UserError(f"torch does not start on this machine: {error}") from error
    if path.exists():
        before = files.read_json(path, fix="delete it")
        names = [[gpu["name"] for gpu in found["gpus"]] for found in (before, facts)]
        fix = "name another folder, --out=FOLDER"
        require(names[0] == names[1], f"{folder} is of other GPUs: {fix}")
    files.write_atomically(path, json.dumps(facts, indent=1).encode())
    return facts


def chosen(stages: list[Stage], name: str) -> Stage:
    """The stage with this name. UserError if there is none, or it cannot run here."""
    by_name = {stage.name: stage for stage in stages}
    require(name in by_name, f"no stage {program.shown(name)}: there are {', '.join(by_name)}")
    require(not by_name[name].lacks, f"stage {name}: {by_name[name].lacks}")
    return by_name[name]


def main(argv: list[str]) -> None:
    """Run the stages that are not done, alone in the folder, and write the page."""
    (args,) = config.load(argv, NightArgs)
    for ending in ENDINGS:
        if signal.getsignal(ending) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(ending, signal.default_int_handler)  # all as Ctrl-C
    folder = Path(args.out).absolute()
    files.require_ours(folder, ["stages/*"], ["README.md", "facts.json"], "set another --out")
    (folder / "stages").mkdir(parents=True, exist_ok=True)
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "-1")
    hidden = hidden if args.device == "cpu" else {}
    with files.locked(folder / "stages" / "lock", "another night writes to this folder, begun"):
        facts = learn_facts(folder, hidden)
        stages = stages_of(folder, facts)
        only = chosen(stages, args.stage) if args.stage else None
        gpus = len(facts["gpus"])
        no_gpu = "torch sees no GPU: a miniature on the CPU (if you have one: INSTALL.md)"
        print(f"{gpus} x {facts['gpus'][0]['name']}" if gpus else no_gpu, flush=True)
        run_stages(folder, stages, only, args.minutes, hidden)
    print(night_report.summary(folder))
    print(f"Read {folder}/README.md: its end says how to send the folder")


def run_stages(
    folder: Path, stages: list[Stage], only: Stage | None, minutes: float, hidden: dict
) -> None:
    """Run the stages that are not done, or `only` one; write the page after each."""
    status = {state["stage"]: state["status"] for state in night_report.read_states(folder)}
    for number, stage in enumerate(stages, 1):
        if stage.name not in status:
            write_state(folder, number, stage, "not reached")
    for number, stage in enumerate(stages, 1):
        if only not in (None, stage):
            continue
        title = f"[{number}/{len(stages)}] {stage.name}, {stage.about}"
        if stage.lacks:
            result = f"not run: {stage.lacks}"
            write_state(folder, number, stage, result)
        elif status.get(stage.name) == "done" and not only:
            result = "done before"
        else:
            print(f"{title} ...", flush=True)
            result = run_stage(folder, number, stage, minutes, hidden)
        print(f"{title}: {result}", flush=True)
        night_report.write(folder)


if __name__ == "__main__":
    program.run(main)

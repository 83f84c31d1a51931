"""Runs of the trainer: in the ranks of a pool, or in processes of their own that a test may kill.

    ranks(2)(train_here, flags)                          status, message and output of each rank

    with Job(folder, 2, fsdp_train.main, flags, fault=hangs) as job:
        job.send(signal.SIGKILL, 1)
        job.wait()                                       the exit status of each rank
        job.errors()                                     the error lines of all ranks

    Program(serve.main, ["run"], folder, folder / "log")    a program of one process

These are forked from one process that has imported the trainer. A program started as a
user starts it needs two seconds of a core for each rank to import PyTorch.
"""

import atexit
import contextlib
import io
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from conftest import PATIENCE, ROOT, clean_environment

import fsdp_train
import processes
import program
from launch.pool import free_port, torchrun_variables
from lifecycle import runlog
from program import UserError
from weights.load import load_model

SIZE = "--d_model=32 --n_heads=4 --n_layers=2 --vocab_size=260 --max_seq_len=32".split()
BATCH = "--global_batch_size=8 --microbatch_size=2 --warmup_steps=2 --eval_tokens=2000".split()
FLAGS = [*SIZE, *BATCH, "--eval_interval=0", "--device=cpu", "--precision=fp32", "--keep_last=9"]
FOREVER = ["--max_steps=1000000", "--schedule=constant"]

FORKS = multiprocessing.get_context("forkserver")


def train_here(world, flags, prepare=None) -> tuple[int, str, str]:
    """fsdp_train.main in a rank of a pool: exit status, message, what it printed.

    prepare: `prepare(rank)` is a context in which it runs.
    """
    rank, size = str(world.global_rank), str(world.global_size)
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, variables),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        prepare(world.global_rank) if prepare else contextlib.nullcontext(),
    ):
        try:
            fsdp_train.main(flags)
            return 0, "", out.getvalue()
        except UserError as error:
            return error.status, str(error), out.getvalue()
        except SystemExit as leaving:
            return leaving.code, "", out.getvalue()


def train_in(world, folder, flags, prepare=None) -> tuple[int, str, str]:
    """The same in a folder."""
    os.chdir(folder)
    return train_here(world, flags, prepare)


def steps_of(run_dir) -> dict:
    """step -> row, of the steps in metrics.jsonl, each of which is there once."""
    rows = [row for row in runlog.read(run_dir) if "loss" in row]
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row for row in rows}


def figures(run_dir) -> list:
    """Of each row of metrics.jsonl, what does not depend on the machine's speed."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "batch_hash", "val_loss")
    return [[row.get(key) for key in keys] for row in runlog.read(run_dir)]


def load(path) -> dict:
    """The weights in a checkpoint."""
    return load_model(path, torch.device("cpu")).state_dict()


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def start_server() -> None:
    """Start the process that forks the ranks, unless it runs. Its threads would not be forked."""
    before, folder = dict(os.environ), os.getcwd()
    os.chdir(ROOT)  # not the folder of one test
    os.environ.update(clean_environment(), PYTHONPATH=f"{ROOT}:{ROOT}/tests")
    programs = ["serve", "web.server", "web.worker"] if "serve" in sys.modules else []
    FORKS.set_forkserver_preload([__name__, *programs])
    multiprocessing.forkserver.ensure_running()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(before)


class Job:
    """`size` ranks in `folder`, which write to its file `log`. All run `main(argv)`.

    A context: at its end all ranks are killed.

    fault: `fault(rank)` is a context in which the rank runs.
    """

    def __init__(self, folder: Path, size: int, main, argv=(), fault=None):
        self.folder, self.size = folder, size
        port = free_port()
        start_server()
        self.processes = []
        for rank in range(size):
            variables = torchrun_variables(rank, size, port)
            place = (str(folder), "log", variables, fault)
            arguments = (processes.run, main, list(map(str, argv)), *place)
            self.processes.append(FORKS.Process(target=be_a_program, args=arguments))
            self.processes[-1].start()

    def send(self, number: int, rank: int) -> None:
        """Send a signal to a rank that has not ended."""
        if self.processes[rank].is_alive():
            os.kill(self.processes[rank].pid, number)

    def wait(self, seconds: float = PATIENCE, but: int | None = None) -> list[int]:
        """Wait for all ranks `but` one. Their exit statuses; None for one that has not ended."""
        deadline = time.monotonic() + seconds
        awaited = [process for rank, process in enumerate(self.processes) if rank != but]
        for process in awaited:
            process.join(max(0, deadline - time.monotonic()))
        return [process.exitcode for process in awaited]

    def runs(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def errors(self) -> list[str]:
        """What went wrong, in one line each."""
        return [line for line in self.log().splitlines() if line.startswith("error")]

    def name_of(self, rank: int) -> str:
        """How errors call a rank, up to the name of the machine."""
        return f"rank {rank} (process {self.processes[rank].pid} on "

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Program:
    """A program of one process, `main(argv)` in `folder`, which writes to the file `log`.

    It has the methods of a Popen. n_files: how many files it may open.
    """

    running = []

    def __init__(self, main, argv, folder: Path, log: Path, n_files: int | None = None):
        start_server()
        place = (str(folder), str(log), {}, None, n_files)
        arguments = (program.run, main, list(map(str, argv)), *place)
        self.process = FORKS.Process(target=be_a_program, args=arguments)
        self.process.start()
        self.pid = self.process.pid
        self.running.append(self)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, seconds: float = PATIENCE) -> int:
        self.process.join(seconds)
        assert self.poll() is not None, "it does not end"
        return self.poll()


@atexit.register
def end_programs() -> None:
    """Those that a test which failed has left: Python would wait for them."""
    for each in Program.running:
        each.kill()


def be_a_program(run, main, argv, folder, log, variables, fault=None, n_files=None) -> None:
    """Run `main(argv)`, as `python PROGRAM argv` would. run: how it starts and ends."""
    os.chdir(folder)
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    write_to(log)
    if n_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, n_files))
    sys.argv = [f"{main.__module__}.py", *argv]
    with fault(int(variables["RANK"])) if fault else contextlib.nullcontext():
        run(main)


def write_to(log: str) -> None:
    """What this process prints goes to the end of a file."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def wait_for(condition, seconds: float = PATIENCE) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.02)

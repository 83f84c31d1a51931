"""slurm/train.sbatch and slurm/train_srun.sbatch, submitted to a real SLURM (slurm_cluster.py).

sbatch gets the scripts as users give them to it. Changed are the number of GPUs, the network's
interface, and the time limit. torchrun and fsdp_train.py are real, except where a test says so.
"""

import contextlib
import os
import re
import signal
import time

import pytest
from conftest import PATIENCE, ROOT, flags_for
from launches import FLAGS

from lessons.elastic import steps_done
from lifecycle import runlog

pytestmark = pytest.mark.slow

TORCHRUN, SRUN = "slurm/train.sbatch", "slurm/train_srun.sbatch"
BOTH = [TORCHRUN, SRUN]
TINY = [*FLAGS, "--max_steps=30", "--save_interval=4"]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

PROGRAMS = {
    ".venv/bin/torchrun": '#!/bin/sh\nexec PYTHON -m torch.distributed.run "$@"\n',
    ".venv/bin/python": '#!/bin/sh\nexec PYTHON "$@"\n',
}
# Training that stays in its sixth step until it is asked to stop, or there is a file `go`. Then a
# test need not hurry. A launch that resumes does not stay.
STAYS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from lifecycle import stopping
stopping.while_loading(sys.argv[1:])
import os, time
import fsdp_train, processes

class Signals(stopping.Signals):
    def __init__(self):
        super().__init__()
        made.append(self)

def train_step(model, optimizer, rows, step, *rest):
    steps.append(step)
    while step == 5 and steps[0] == 0 and not made[0].stop_signal and not os.path.exists("go"):
        time.sleep(0.05)
    return one_step(model, optimizer, rows, step, *rest)

made, steps = [], []
one_step, fsdp_train.train_step = fsdp_train.train_step, train_step
stopping.Signals = Signals
processes.run(fsdp_train.main)
"""


class Job:
    """A job of SLURM, in a folder of its own that looks like the project's."""

    def __init__(self, slurm, folder):
        self.slurm, self.folder = slurm, folder
        (folder / ".venv/bin").mkdir(parents=True)
        for name, text in PROGRAMS.items():
            self.put(name, text)
        rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
        for path in [*ROOT.glob("*.py"), *rooms, ROOT / "slurm"]:
            (folder / path.name).symlink_to(path)

    def put(self, name, text) -> None:
        """Put a program in place of the one that the script starts."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_text(text.replace("PYTHON", os.sys.executable))
        path.chmod(0o755)

    def submit(self, script, *args, nodes=2, ranks_per_node=1, edit=lambda text: text, **more):
        """sbatch. edit: changes the script first. more: `options` of sbatch, and variables."""
        text = edit((ROOT / script).read_text())
        text = text.replace("--nproc_per_node 8", f"--nproc_per_node {ranks_per_node}")
        text = text.replace("=hsn0", "=lo")  # gloo fails if there is no such interface
        (self.folder / "job.sbatch").write_text(text)
        tasks = 1 if script == TORCHRUN else ranks_per_node
        options = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", *more.pop("options", [])]
        words = [*options, "job.sbatch", *map(str, args)]
        self.number = self.slurm.sbatch(*words, cwd=self.folder, **more)
        return self

    def said(self) -> str:
        """The log."""
        path = self.folder / f"mpt-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def shown(self) -> dict[str, str]:
        return self.slurm.job(self.number)

    def restarts(self) -> int:
        return int(self.shown()["Restarts"])

    def end(self) -> tuple[str, str]:
        """Wait for it. How it ended, and its exit status: ("FAILED", "2:0")."""
        self.slurm.wait_for(lambda: self.shown()["JobState"] in ENDED)
        shown = self.shown()
        return shown["JobState"], shown["ExitCode"]

    def wait_for(self, condition) -> None:
        """Wait until it holds. The job must not end before."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            ended = self.shown()["JobState"] in ENDED
            assert (not ended or condition()) and time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def stays(self) -> "Job":
        """Wait until its run is in the sixth step (see STAYS)."""
        self.wait_for(lambda: steps_done(self.folder / "run") == 5)
        return self

    def scancel(self, *words) -> None:
        self.slurm.run("scancel", *words, self.number)


@pytest.fixture
def job(slurm, tmp_path):
    """`job()`: a new one. Those that run are cancelled at the end."""
    made = []

    def new() -> Job:
        made.append(Job(slurm, tmp_path / str(len(made))))
        return made[-1]

    yield new
    for each in made:
        with contextlib.suppress(AttributeError):  # it was not submitted
            slurm.run("scancel", each.number)
            each.end()


# --------------------------------------------------------------------------------------------------
# Ranks

WHO = """
import json, os
import processes

def main(argv):
    world = processes.start("cpu")
    place = world.global_rank, world.global_size, world.local_rank, world.local_size
    names = "SLURMD_NODENAME SLURM_CPUS_PER_TASK OMP_NUM_THREADS CUDA_VISIBLE_DEVICES "
    names += "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    print("rank " + json.dumps([place, [os.environ.get(name) for name in names.split()], argv]))

processes.run(main)
"""


def test_each_rank_knows_its_place_on_two_nodes(job):
    """The four processes really join: processes.start returns when all have joined."""
    jobs = {}
    for script in BOTH:
        jobs[script] = job()
        jobs[script].put("fsdp_train.py", WHO)
        argv = ["configs/a.py", "--run_dir=with space"]
        jobs[script].submit(script, *argv, ranks_per_node=2)
    for script, each in jobs.items():
        assert each.end() == ("COMPLETED", "0:0"), each.said()
        print(each.said())
        assert each.restarts() == 0

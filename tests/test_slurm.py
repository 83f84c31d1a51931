"""slurm/train.sbatch and slurm/train_srun.sbatch, with stand-ins for SLURM's commands.

The stand-in for srun starts the tasks of all nodes on this machine, with the variables that SLURM
sets; it passes signals on to them, and reports the highest of their exit statuses. torchrun and
fsdp_train.py are real.
"""

import contextlib
import functools
import os
import random
import re
import signal
import socket
import subprocess
import sys

import pytest
from conftest import PATIENCE, ROOT, clean_environment, flags_for
from launches import FLAGS, wait_for

from lessons.elastic import steps_done
from lifecycle import runlog

TORCHRUN, SRUN = "slurm/train.sbatch", "slurm/train_srun.sbatch"
BOTH = pytest.mark.parametrize("script", [TORCHRUN, SRUN])
TINY = [*FLAGS, "--max_steps=30"]

STAND_INS = {
    "srun": """#!PYTHON
import os, re, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    print("srun got", words.pop(0), flush=True)
nodes, tasks_per_node = int(os.environ["SLURM_NNODES"]), int(os.environ["TASKS_PER_NODE"])
tasks = []
for rank in range(nodes * tasks_per_node):
    node, local_rank = divmod(rank, tasks_per_node)
    of_task = {"SLURM_PROCID": rank, "SLURM_NODEID": node, "SLURM_LOCALID": local_rank}
    of_task |= {"SLURM_NTASKS": nodes * tasks_per_node, "SLURM_STEP_ID": 0}
    env = os.environ | {name: str(value) for name, value in of_task.items()}
    tasks.append(subprocess.Popen(words, env=env, start_new_session=True))
# SLURM may send the warning to the whole process group of each task.
signal.signal(signal.SIGUSR1, lambda number, frame: [os.killpg(task.pid, number) for task in tasks])
signal.signal(signal.SIGTERM, lambda number, frame: [task.send_signal(number) for task in tasks])
status = [task.wait() for task in tasks]
sys.exit(max(s if s >= 0 else 128 - s for s in status))
""",
    "scontrol": """#!/usr/bin/env bash
case $1 in
show) [[ "$*" == "show hostnames node[1-2]" ]] && printf 'localhost\\nlocalhost\\n' ;;
*) echo "$@" >>scontrol.log ;;
esac
""",
    "apptainer": """#!/usr/bin/env bash
echo "apptainer got $*"
until [[ $1 == *.sif ]]; do shift; done
shift
exec "${@#/opt/mpt/}"
""",
    ".venv/bin/torchrun": """#!/usr/bin/env bash
exec PYTHON -m torch.distributed.run "$@"
""",
    ".venv/bin/python": """#!/usr/bin/env bash
exec PYTHON "$@"
""",
}


def free_port() -> int:
    """A port from the range that both scripts take theirs from."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


class Job:
    """A job of SLURM: `submit(...)` starts a script, `end()` waits for its exit status."""

    def __init__(self, folder):
        self.folder = folder
        self.log = folder / "job.log"
        self.scontrol = folder / "scontrol.log"
        (folder / ".venv/bin").mkdir(parents=True)
        (folder / "bin").mkdir()
        for name, text in STAND_INS.items():
            self.put(name if "/" in name else f"bin/{name}", text)
        rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
        for path in [*ROOT.glob("*.py"), *rooms, ROOT / "slurm"]:
            (folder / path.name).symlink_to(path)
        self.id = str(free_port() - 20000)  # both scripts use the port 20000 + job number % 12000

    def put(self, name, text) -> None:
        """Put a program in place of the one that the script starts."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_text(text.replace("PYTHON", sys.executable))
        path.chmod(0o755)

    def submit(self, script, *args, nodes=1, ranks_per_node=2, edit=lambda text: text, **variables):
        """Start a script on `nodes` nodes. edit: changes its text first."""
        text = edit((ROOT / script).read_text())
        text = text.replace("--nproc_per_node 8", f"--nproc_per_node {ranks_per_node}")
        text = text.replace("=hsn0", "=lo")  # gloo fails if there is no such interface
        (self.folder / "job.sbatch").write_text(text)  # SLURM runs a copy, too

        tasks_per_node = 1 if script == TORCHRUN else ranks_per_node
        slurm = {"SLURM_JOB_ID": self.id, "SLURM_JOB_NODELIST": "node[1-2]"}
        slurm |= {"SLURM_NNODES": str(nodes), "SLURM_CPUS_PER_TASK": "3"}
        slurm |= {"TASKS_PER_NODE": str(tasks_per_node)}
        path = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        options = {"cwd": self.folder, "env": clean_environment() | slurm | path | variables}
        command = ["bash", "job.sbatch", *map(str, args)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, **options
            )

    def end(self) -> int:
        """The exit status."""
        return self.process.wait(PATIENCE)

    def said(self) -> str:
        """The log."""
        return self.log.read_text()

    def wait_for(self, condition) -> None:
        """Wait until it holds, or the job ends."""
        wait_for(lambda: condition() or self.process.poll() is not None)
        assert condition(), self.said()

    def signal(self, number) -> None:
        """Send a signal to srun's tasks, as SLURM does, and not to the script."""
        command = ["pgrep", "-P", str(self.process.pid)]
        srun = subprocess.run(command, capture_output=True, text=True, check=True)
        os.kill(int(srun.stdout), number)

    def requeued(self) -> int:
        """How many times the job was requeued."""
        lines = self.scontrol.read_text().splitlines() if self.scontrol.exists() else []
        assert set(lines) <= {f"requeue {self.id}"}
        return len(lines)


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    if made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGTERM)  # torchrun ends its workers
        made.process.wait(PATIENCE)


# --------------------------------------------------------------------------------------------------
# Ranks

WHO = """
import os
import processes

def main(argv):
    world = processes.start("cpu")
    rank = f"{world.global_rank}/{world.global_size} {world.local_rank}/{world.local_size}"
    threads = os.environ["OMP_NUM_THREADS"]
    print(f"{rank} {threads} {argv}\\n", end="", flush=True)

processes.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script, threads", [(TORCHRUN, 8), (SRUN, 3)])
def test_each_rank_knows_its_place_on_two_nodes(job, script, threads):
    """The four processes really join: processes.start returns when all have joined."""
    job.put("fsdp_train.py", WHO)
    job.submit(script, "configs/a.py", "--run_dir=with space", nodes=2)
    assert job.end() == 0, job.said()
    answers = re.findall(r"^(\d/\d \d/\d) (\d+) (.*)$", job.said(), re.M)
    argv = "['configs/a.py', '--run_dir=with space']"
    ranks = [f"{rank}/4 {rank % 2}/2" for rank in range(4)]
    assert sorted(answers) == [(rank, str(threads), argv) for rank in ranks]
    assert "srun got --cpus-per-task=3" in job.said() and job.requeued() == 0


# --------------------------------------------------------------------------------------------------
# How it ends


FIRST_FAILS = "import os; os._exit({status} if os.environ['SLURM_PROCID'] == '0' else 0)"


@BOTH
@pytest.mark.parametrize("status", [0, 1, 2, 75, 134, 137])
@pytest.mark.parametrize("hours", [0, 1])
def test_only_a_run_that_asks_for_it_or_was_under_way_is_started_again(job, script, status, hours):
    """A rank that is killed right after the start, as for lack of memory, would be so again.

    134: SIGABRT, as of NCCL's watchdog; torchrun would say 1. 137: SIGKILL, of torchrun itself or
    of a rank that srun started. SECONDS: as if it began an hour ago.
    """
    job.put("fsdp_train.py", FIRST_FAILS.format(status=status))
    job.put(".venv/bin/torchrun", f"#!/bin/sh\nexit {status}\n")
    begun = f"status=0\nSECONDS={3600 * hours}\n"
    job.submit(script, edit=lambda text: text.replace("status=0\n", begun))
    assert job.end() == status, job.said()
    killed = status == 137 or (status == 134 and script == SRUN)
    assert job.requeued() == (status == 75 or (killed and hours > 0))


WORKER = """
import os, signal, sys, time

def note(number, frame):
    global got
    got = number
    print(f"worker got {signal.Signals(number).name}\\n", end="", flush=True)

got = None
signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGTERM, note)
print("worker starts\\n", end="", flush=True)
begin = time.monotonic()
while not got and time.monotonic() < begin + 60:
    time.sleep(0.05)
"""
LEAVES = """
time.sleep(0.5)  # saves
if os.environ["LOCAL_RANK"] == "0":
    os.kill(os.getppid(), signal.SIGTERM)  # as stopping.leave
sys.exit(75)
"""


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_warning_goes_past_torchrun_to_its_workers(job, nodes):
    """SLURM restarts them, not torchrun, which has three restarts left."""
    job.put("fsdp_train.py", WORKER + LEAVES)
    job.submit(TORCHRUN, nodes=nodes)
    job.wait_for(lambda: job.said().count("worker starts") == 2 * nodes)
    job.signal(signal.SIGUSR1)
    assert job.end() == 75, job.said()
    assert job.requeued() == 1
    assert job.said().count("worker got SIGUSR1") == job.said().count("worker starts") == 2 * nodes
    assert "got signal: 15" in job.said()  # from torchrun, so it was still running


@pytest.mark.slow
def test_a_run_that_finishes_in_spite_of_the_warning_is_not_started_again(job):
    job.put("fsdp_train.py", WORKER)
    job.submit(TORCHRUN)
    job.wait_for(lambda: job.said().count("worker starts") == 2)
    job.signal(signal.SIGUSR1)
    assert (job.end(), job.requeued()) == (0, 0), job.said()


@pytest.mark.slow
def test_a_job_that_is_cancelled_saves_and_is_not_started_again(job):
    """SIGTERM is passed on like the warning: torchrun itself would kill the workers after 30 s."""
    job.put("fsdp_train.py", WORKER + LEAVES)
    job.submit(TORCHRUN)
    job.wait_for(lambda: job.said().count("worker starts") == 2)
    job.signal(signal.SIGTERM)
    assert job.end() not in (0, 75) and job.requeued() == 0, job.said()
    assert job.said().count("worker got SIGUSR1") == job.said().count("worker starts") == 2


@pytest.mark.slow
def test_torchrun_starts_failed_workers_three_times(job):
    job.put("fsdp_train.py", "print('worker starts\\n', end=''); raise SystemExit(75)")
    job.submit(TORCHRUN, ranks_per_node=1)
    assert (job.end(), job.requeued()) == (1, 0), job.said()
    assert job.said().count("worker starts") == 4


@pytest.mark.slow
@BOTH
def test_a_real_run_is_warned_and_goes_on_as_if_it_had_not_been(job, script, tiny_data):
    args = [*TINY, *flags_for(tiny_data)]
    one_thread = functools.partial(re.sub, "OMP_NUM_THREADS=.*", "OMP_NUM_THREADS=1")
    job.submit(script, *args, "--run_dir=straight", edit=one_thread)
    assert job.end() == 0, job.said()
    job.submit(script, *args, "--run_dir=warned", edit=one_thread)
    job.wait_for(lambda: steps_done(job.folder / "warned") >= 5)
    job.signal(signal.SIGUSR1)
    assert job.end() == 75 and job.requeued() == 1, job.said()
    job.submit(script, *args, "--run_dir=warned", edit=one_thread)
    assert job.end() == 0 and "resuming from" in job.said() and job.requeued() == 1, job.said()
    straight, warned = (runlog.read(job.folder / name) for name in ("straight", "warned"))
    keys = ("step", "loss", "grad_norm", "batch_hash", "val_loss")
    expected = [[row.get(key) for key in keys] for row in straight]
    assert [[row.get(key) for key in keys] for row in warned] == expected


# --------------------------------------------------------------------------------------------------
# The text of the scripts


def uncommented(text) -> str:
    """The script with its commented alternatives switched on."""
    return re.sub(r"^# +(export \w+=.*)$", r"\1", text, flags=re.M)


@BOTH
@pytest.mark.parametrize("flag", ["--rocm", "--nv"])
def test_ranks_run_in_a_container(job, script, flag):
    job.put("fsdp_train.py", "import os; print(os.environ['NCCL_IB_GID_INDEX'])")
    find_program = 'while [ "$1" != fsdp_train.py ]; do shift; done'
    job.put(".venv/bin/torchrun", f'#!/bin/sh\n{find_program}; exec PYTHON "$@"\n')
    container = (ROOT / "slurm/container.sh").read_text()
    device = job.folder / "kfd"
    if flag == "--rocm":
        device.touch()
    here = container.replace("/dev/kfd", str(device))
    job.submit(
        script,
        edit=lambda text: uncommented(text).replace("source slurm/container.sh", here),
        MPT_IMAGE="mpt.sif",
    )
    assert job.end() == 0, job.said()
    command = f"exec {flag} --bind {job.folder} --pwd {job.folder} mpt.sif"
    assert f"apptainer got {command}" in job.said()
    assert "\n3\n" in job.said()


@BOTH
def test_the_header_lets_slurm_warn_and_start_again(script):
    header = re.findall(r"^#SBATCH (\S+)$", (ROOT / script).read_text(), re.M)
    expected = {"--requeue", "--signal=USR1@180", "--open-mode=append", "--output=%x-%j.log"}
    assert expected <= set(header)


def test_ranks_of_torchrun_do_not_share_a_store():
    of_torchrun = (ROOT / TORCHRUN).read_text()
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in of_torchrun  # see test_hosts.py

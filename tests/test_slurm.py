"""slurm/train.sbatch and slurm/train_srun.sbatch, submitted to a real SLURM (slurm_cluster.py).

sbatch gets the scripts as users give them to it. Changed are the number of GPUs, the network's
interface, and the time limit. torchrun and fsdp_train.py are real, except where a test says so.
"""

import collections
import itertools
import json
import re
import sys
import time

import pytest
from conftest import PATIENCE, ROOT, flags_for
from launches import FLAGS, figures

import checkpoint
from lessons.elastic import steps_done

pytestmark = pytest.mark.slow

TORCHRUN, SRUN = "slurm/train.sbatch", "slurm/train_srun.sbatch"
BOTH = [TORCHRUN, SRUN]
TINY = [*FLAGS, "--max_steps=30", "--save_interval=4"]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

PROGRAMS = {
    ".venv/bin/torchrun": '#!/bin/sh\nexec PYTHON -m torch.distributed.run "$@"\n',
    ".venv/bin/python": '#!/bin/sh\nexec PYTHON "$@"\n',
}
# Training that stays in one step, the first from the sixth on that finds a checkpoint, until it is
# asked to stop or there is a file `go`: so a test need not hurry. A launch that resumes does not.
STAYS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from lifecycle import stopping
stopping.while_loading(sys.argv[1:])
import os, time
from pathlib import Path
import checkpoint, fsdp_train, processes

class Signals(stopping.Signals):
    def __init__(self):
        super().__init__()
        made.append(self)

def train_step(model, optimizer, rows, step, *rest):
    steps.append(step)
    if os.environ["RANK"] == "0" and steps[0] == 0 and step >= 5:
        stay()
    return one_step(model, optimizer, rows, step, *rest)

def stay():
    if not checkpoint.latest("run"):
        time.sleep(0.5)  # it becomes complete between two steps
        return
    Path("stays").touch()
    while not made[0].stop_signal and not os.path.exists("go"):
        time.sleep(0.05)

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
        path.write_text(text.replace("PYTHON", sys.executable))
        path.chmod(0o755)

    def submit(self, script, *args, nodes=2, ranks_per_node=1, edit=lambda text: text, **more):
        """sbatch. edit: changes the script first. more: `options` of sbatch, and variables."""
        self.script = script
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

    def nodes(self) -> list[str]:
        """Its nodes. The first one has the script."""
        shown = self.slurm.run("scontrol", "show", "hostnames", self.shown()["NodeList"])
        return shown.stdout.split()

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
            time.sleep(0.3)

    def stays(self) -> None:
        """Wait until its run does (see STAYS)."""
        self.wait_for((self.folder / "stays").exists)
        return self

    def resumes(self) -> bool:
        """Has its run gone on from a checkpoint?"""
        return "resuming from run/checkpoints/step-" in self.said()

    def limit(self, minutes: int) -> None:
        """Set its time limit, if it has not ended."""
        words = ["scontrol", "update", f"jobid={self.number}", f"timelimit={minutes}"]
        self.slurm.run(*words, check=False)

    def scancel(self, *words) -> None:
        self.slurm.run("scancel", *words, self.number)


@pytest.fixture(scope="module")
def train(tiny_data):
    """`train(job, script)` submits a run of 30 steps, by default on two nodes with a rank each."""
    flags = [*TINY, *flags_for(tiny_data), "--run_dir=run"]
    return lambda job, script, *args, **more: job.submit(script, *flags, *args, **more)


@pytest.fixture(scope="module", autouse=True)
def begun(slurm, train, tmp_path_factory):
    """Runs that take their time while the tests go on: one without a break, by neither; and by both
    scripts one that SLURM will warn within a minute, since its time limit comes near."""
    jobs = {name: Job(slurm, tmp_path_factory.mktemp("begun")) for name in ("unbroken", *BOTH)}
    train(jobs["unbroken"], SRUN)
    for script in BOTH:
        jobs[script].put("fsdp_train.py", STAYS)
        train(jobs[script], script, options=["--time=60", "--signal=USR1@30"])
    for script in BOTH:
        jobs[script].stays()
        hours, minutes, seconds = map(int, jobs[script].shown()["RunTime"].split(":"))
        jobs[script].limit(60 * hours + minutes + (1 if seconds < 30 else 2))
    yield jobs
    for each in jobs.values():
        each.scancel()


@pytest.fixture(scope="module")
def straight(begun):
    """The curve of the unbroken run."""
    each = begun["unbroken"]
    assert each.end() == ("COMPLETED", "0:0") and each.restarts() == 0, each.said()
    return figures(each.folder / "run")


@pytest.fixture
def job(slurm, tmp_path):
    """`job()`: a new one. At the end it is cancelled if it still runs."""
    made = []

    def new() -> Job:
        made.append(Job(slurm, tmp_path / str(len(made))))
        return made[-1]

    yield new
    for each in made:
        each.scancel()
    for each in made:
        each.end()


# --------------------------------------------------------------------------------------------------
# Ranks

WHO = """
import json, os
import processes

def main(argv):
    world = processes.start("cpu")
    place = world.global_rank, world.global_size, world.local_rank, world.local_size
    names = "SLURM_CPUS_PER_TASK OMP_NUM_THREADS TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    variables = [os.environ.get(name) for name in names.split()]
    answer = json.dumps([place, os.environ["SLURMD_NODENAME"], variables, argv])
    print(f"rank {answer}\\n", end="", flush=True)

processes.run(main)
"""


def test_each_rank_knows_its_place_on_two_nodes(job):
    """The four processes really join: processes.start returns when all have joined."""
    argv = ["configs/a.py", "--run_dir=with space"]
    jobs = {script: job() for script in BOTH}
    for script, each in jobs.items():
        each.put("fsdp_train.py", WHO)
        each.submit(script, *argv, ranks_per_node=2)
    of_script = {TORCHRUN: ["64", "8", "1"], SRUN: ["7", "7", None]}
    for script, each in jobs.items():
        assert each.end() == ("COMPLETED", "0:0"), each.said()
        ranks = [json.loads(line) for line in re.findall(r"^rank (.*)$", each.said(), re.M)]
        assert sorted(place for place, *_ in ranks) == [[n, 4, n % 2, 2] for n in range(4)]
        nodes = collections.Counter(node for _, node, *_ in ranks)
        assert sorted(nodes.values()) == [2, 2]
        assert all(rest == [of_script[script], argv] for _, _, *rest in ranks)


# --------------------------------------------------------------------------------------------------
# How it ends

FAILS = """
import os, signal
first = os.environ["SLURM_PROCID"] == "0" and "SLURM_RESTART_COUNT" not in os.environ
how = os.environ["HOW"] if first else "0"
if how.isdigit():
    os._exit(int(how))
os.kill(os.getpid(), getattr(signal, how))
"""
# How the first task ends -> the exit status of the job. SIGABRT: as of NCCL's watchdog. SIGKILL: of
# torchrun itself, or of a rank that srun started.
HOW = {"0": 0, "1": 1, "2": 2, "75": 75, "SIGABRT": 134, "SIGKILL": 137}


def begun_ago(hours):
    """What changes a script so that it believes to have begun that long ago."""
    return lambda text: text.replace("status=0\n", f"status=0\nSECONDS={3600 * hours}\n", 1)


def test_only_a_run_that_asks_for_it_or_was_under_way_is_started_again(job):
    """A rank that is killed right after the start, as for lack of memory, would be so again."""
    jobs = {}
    hours_of = {"SIGABRT": [0, 1], "SIGKILL": [0, 1], "1": [1]}
    cases = [(how, hours) for how in HOW for hours in hours_of.get(how, [0])]
    for script, (how, hours) in itertools.product(BOTH, cases):
        each = jobs[script, how, hours] = job()
        each.put("fsdp_train.py", FAILS)
        each.put(".venv/bin/torchrun", f"#!PYTHON\n{FAILS}")
        each.submit(script, nodes=1, ranks_per_node=2, edit=begun_ago(hours), HOW=how)
    ends = {key: (*each.end(), each.restarts()) for key, each in jobs.items()}
    expected = {}
    for script, how, hours in jobs:
        killed = how == "SIGKILL" or (how == "SIGABRT" and script == SRUN)
        if how == "0" or how == "75" or (killed and hours):
            expected[script, how, hours] = ("COMPLETED", "0:0", int(how != "0"))
        else:
            expected[script, how, hours] = ("FAILED", f"{HOW[how]}:0", 0)
    assert ends == expected


FINISHES = """
import os, signal, time
got = []
signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
print("worker starts\\n", end="", flush=True)
while not got:
    time.sleep(0.05)
print("worker was warned\\n", end="", flush=True)
os._exit(0)  # as processes.run: while Python shuts down, a second warning would kill it
"""


def test_a_run_that_finishes_in_spite_of_the_warning_is_not_started_again(job):
    each = job()
    each.put("fsdp_train.py", FINISHES)
    each.submit(TORCHRUN, nodes=1, ranks_per_node=2)
    each.wait_for(lambda: each.said().count("worker starts") == 2)
    each.scancel("--signal=USR1")
    assert each.end() == ("COMPLETED", "0:0") and each.restarts() == 0, each.said()
    assert each.said().count("worker was warned") == 2


# --------------------------------------------------------------------------------------------------
# Real runs


@pytest.fixture
def both_stay(job, train) -> list[Job]:
    """A run by each script that stays in a step, with an earlier checkpoint.

    The scripts believe to have begun an hour ago. When one task has ended, the others have ten
    seconds instead of a minute.
    """

    def edit(text):
        return begun_ago(hours=1)(text).replace("--wait=60", "--wait=10")

    jobs = [job() for _ in BOTH]
    for script, each in zip(BOTH, jobs, strict=True):
        each.put("fsdp_train.py", STAYS)
        train(each, script, edit=edit)
    for each in jobs:
        each.stays()
    return jobs


def test_a_job_that_is_cancelled_saves_and_is_not_started_again(slurm, both_stay):
    """torchrun itself would kill its workers 30 s after SIGTERM."""
    for each in both_stay:
        each.scancel()
    for each in both_stay:
        assert each.end()[0] == "CANCELLED" and each.restarts() == 0, each.said()
        slurm.wait_for(lambda number=each.number: not slurm.tasks(number))
        saved = checkpoint.number(checkpoint.latest(each.folder / "run"))
        assert steps_done(each.folder / "run") == saved, each.said()


def test_a_run_that_lost_a_torchrun_or_a_node_goes_on(slurm, both_stay, straight):
    """From its last checkpoint. The torchrun on the other node cannot replace the killed one.

    SLURM ends what is left of a job that lost a node and requeues it, whatever the script does.
    """
    by_torchrun, by_srun = both_stay
    tasks = slurm.tasks(by_torchrun.number)
    next(task for task in tasks if "torch.distributed.run" in task.words[:3]).kill()
    _, lost = by_srun.nodes()
    slurm.lose(lost)
    for each in both_stay:
        (each.folder / "go").touch()
    for each in both_stay:
        assert each.end() == ("COMPLETED", "0:0") and each.restarts() == 1, each.said()
        assert each.resumes() and figures(each.folder / "run") == straight
    assert lost not in by_srun.nodes()
    slurm.restore(lost)


def test_before_the_time_limit_a_run_saves_and_goes_on_later(begun, straight):
    """The warning passes torchrun by. Without a user's options it comes three minutes before."""
    for script in BOTH:
        assert "\n#SBATCH --signal=USR1@180\n" in (ROOT / script).read_text()
        each = begun[script]
        each.wait_for(lambda each=each: each.restarts() > 0)
        each.limit(60)
        assert each.end() == ("COMPLETED", "0:0"), each.said()
        assert each.resumes() and "stopping, as asked" in each.said()
        assert figures(each.folder / "run") == straight


# --------------------------------------------------------------------------------------------------
# Containers

# Apptainer is not there: it notes how it was called, and runs the command here.
APPTAINER = """#!/usr/bin/env bash
echo "apptainer got $*"
until [[ $1 == *.sif ]]; do shift; done
shift
exec "${@#/opt/mpt/}"
"""


def test_ranks_run_in_a_container(slurm, job):
    """With the commented settings of the scripts switched on: they come to the ranks."""
    jobs = {}
    for script, flag in zip(BOTH, ["--rocm", "--nv"], strict=True):
        each = jobs[flag, script] = job()
        each.put("fsdp_train.py", "import os; print('index', os.environ['NCCL_IB_GID_INDEX'])")
        find_program = 'while [ "$1" != fsdp_train.py ]; do shift; done'
        each.put(".venv/bin/torchrun", f'#!/bin/sh\n{find_program}; exec PYTHON "$@"\n')
        (each.folder / "bin").mkdir()
        each.put("bin/apptainer", APPTAINER)
        device = each.folder / "kfd"
        if flag == "--rocm":
            device.touch()
        container = (ROOT / "slurm/container.sh").read_text().replace("/dev/kfd", str(device))

        def edit(text, container=container):
            text = re.sub(r"^# +(export \w+=.*)$", r"\1", text, flags=re.M)
            return text.replace("source slurm/container.sh", container)

        path = f"{each.folder}/bin:{slurm.environment['PATH']}"
        each.submit(script, nodes=1, edit=edit, MPT_IMAGE="mpt.sif", PATH=path)
    for (flag, _), each in jobs.items():
        assert each.end() == ("COMPLETED", "0:0"), each.said()
        command = f"exec {flag} --bind {each.folder} --pwd {each.folder} mpt.sif"
        assert f"apptainer got {command}" in each.said() and "index 3\n" in each.said()

"""A real SLURM on this machine, for the time of a test session: a controller and ten nodes.

    cluster.sbatch("job.sbatch", cwd=folder)    submits; the number of the job
    cluster.job(number)                         what `scontrol show job` says: {"JobState": ...}
    cluster.tasks(number)                       the processes of a job's tasks, for a test to kill
    cluster.lose("n1"), cluster.restore("n1")   a node goes away, and comes back
    cluster.command("squeue")                   the words that run a command inside

The daemons, and all that their jobs start, are in namespaces of their own: ports, process numbers
and /etc/hosts are theirs alone. So two clusters can run at once, and nothing of this machine is
changed. When the first process in there ends, so do all others, and it ends with the process that
started it: a session that is killed leaves nothing running. See the fixture `slurm`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from conftest import PATIENCE, clean_environment

NODES = 10
DAEMONS = ("slurmctld", "slurmd", "munged")
TOOLS = ("sbatch", "srun", "unshare", "nsenter", "setpriv", "ip")
INSTALL = "apt-get install slurmctld slurmd slurm-client munge"

# Every node has the CPUs and GPUs that the scripts of slurm/ ask for, or says so. cred_expire: so
# many seconds a job waits that goes back into the queue, 120 by default.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=26817
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=300
MinJobAge=86400
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2,sched_min_interval=0
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[26821-{last}] CPUs=64 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# The first process of the namespaces. bash takes in processes whose parent is gone. SLURM resolves
# no name where the only address is 127.0.0.1 (AI_ADDRCONFIG).
START = """
set -e
mount --bind "$1/hosts" /etc/hosts
ip link set lo up
ip address add 10.99.0.1/32 dev lo
munged --force --socket="$1/munge.socket" --key-file="$1/munge.key" --pid-file="$1/munge.pid" \
    --log-file="$1/munge.log" --seed-file="$1/munge.seed"
slurmctld -c
for node in $2; do slurmd -N "$node"; done
sleep infinity &
while true; do wait || true; done
"""


def missing() -> str:
    """Why SLURM cannot run here, with what to install; empty if it can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root, for namespaces"
    if absent := [name for name in DAEMONS + TOOLS if not shutil.which(name, path=path)]:
        return f"needs {' '.join(absent)}: {INSTALL}"
    if subprocess.run([*alone(), "true"], capture_output=True).returncode:
        return "needs the right to make namespaces (unshare)"
    return ""


def alone() -> list[str]:
    """The words before a command that starts it in namespaces, which end with this process."""
    unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["setpriv", "--pdeathsig=KILL", *unshare]


class Cluster:
    """Controller and nodes n1, n2, ..., with all their files in `folder`. A context."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.nodes = [f"n{number}" for number in range(1, NODES + 1)]
        host = os.uname().nodename.split(".")[0]
        fields = {"host": host, "folder": folder, "nodes": NODES, "last": 26820 + NODES}
        self.conf.write_text(CONF.format(**fields))
        (folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(self.nodes)}\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        for name in ("state", "spool", "dev"):
            (folder / name).mkdir()
        for number in range(8):  # GPUs of which SLURM only wants to see the files
            os.mknod(folder / f"dev/gpu{number}", 0o20666, os.makedev(1, 3))
        gpus = f"NodeName=n[1-{NODES}] Name=gpu File={folder}/dev/gpu[0-7]\n"
        (folder / "gres.conf").write_text(gpus)
        self.environment = clean_environment() | {
            "SLURM_CONF": str(self.conf),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def __enter__(self):
        with open(self.folder / "start.log", "w") as log:
            self.process = subprocess.Popen(
                [*alone(), "bash", "-c", START, "slurm", str(self.folder), " ".join(self.nodes)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self.wait_for(lambda: self.states() == ["idle"] * NODES)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        self.process.kill()
        self.process.wait()

    def wait_for(self, condition) -> None:
        """Wait until it holds. AssertionError with the logs if SLURM has ended, or in vain."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            alive = self.process.poll() is None
            assert alive and time.monotonic() < deadline, self.logs()
            time.sleep(0.3)  # each look costs a process

    def logs(self) -> str:
        """The end of each log."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in paths)

    # ----------------------------------------------------------------------------------------------
    # Commands

    def command(self, *words, where=()) -> list[str]:
        """The words that run a command beside the daemons, with this machine's process numbers."""
        inside = ["nsenter", f"--target={self.first()}", "--mount", "--net", *where]
        return [*inside, *map(str, words)]

    def first(self) -> int:
        """The first process in the namespaces: the child of `unshare`."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text())

    def run(self, *words, check=True, where=(), env=None) -> subprocess.CompletedProcess:
        """Run a command there, and return its output. where: flags of nsenter."""
        options = {"env": env or self.environment, "capture_output": True, "text": True}
        done = subprocess.run(self.command(*words, where=where), timeout=PATIENCE, **options)
        assert done.returncode == 0 or not check, (words, done.stdout, done.stderr)
        return done

    def states(self) -> list[str]:
        """The states of the nodes, in their order. Nothing as long as the controller is silent."""
        has_begun = (self.folder / "slurmctld.pid").exists()
        if self.process.poll() is not None or not has_begun:
            return []
        done = self.run("sinfo", "--Node", "--noheader", "--format=%T", check=False)
        return done.stdout.split()

    def sbatch(self, *words, cwd: Path, **variables) -> int:
        """Submit a job, in a folder. Its number."""
        words = ["sbatch", "--parsable", *words]
        return int(self.run(*words, where=[f"--wd={cwd}"], env=self.environment | variables).stdout)

    def job(self, number: int) -> dict[str, str]:
        """What the controller knows of a job: JobState, ExitCode, Restarts, NodeList, ..."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    # ----------------------------------------------------------------------------------------------
    # Nodes and processes

    def lose(self, node: str) -> None:
        """Kill a node's daemon and all its tasks; the controller learns that it is gone."""
        tasks = [each for each in processes() if each.environment.get("SLURMD_NODENAME") == node]
        keepers = {each.parent for each in tasks}
        for each in processes():
            keeper = each.pid in keepers and each.words[0].startswith("slurmstepd")
            if keeper or each.words[:3] == ["slurmd", "-N", node]:
                each.kill()
        for each in tasks:
            each.kill()
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def restore(self, node: str) -> None:
        """Start the daemon of a lost node."""
        self.run("slurmd", "-N", node, where=["--pid"])
        self.wait_for(lambda: self.states()[self.nodes.index(node)] == "idle")

    def tasks(self, number: int) -> list["Process"]:
        """The processes of a job's steps."""
        found = (
            each for each in processes() if each.environment.get("SLURM_JOB_ID") == str(number)
        )
        return [each for each in found if each.environment.get("SLURM_STEP_ID", "").isdigit()]


class Process(NamedTuple):
    """A process as /proc shows it, with its number on this machine."""

    pid: int
    parent: int
    words: list[str]
    environment: dict[str, str]

    def kill(self) -> None:
        """kill -9, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def processes() -> list[Process]:
    """The processes that can be read."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            variables = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            pairs = (variable.partition("=") for variable in variables)
            environment = {name: value for name, _, value in pairs}
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            found.append(Process(int(path.name), parent, words, environment))
    return found

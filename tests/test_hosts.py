"""Two hosts, each with a network, a name and processes of its own, joined by a virtual cable.

They train under torchrun as slurm/train.sbatch starts it. One of them dies, or its cable is pulled,
and it comes back. TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set as there: without it torchrun (of
torch 2.13) does not publish the address of its store again, and the host that comes back waits for
it in vain. test_processes.py does without the variable.
"""

import os
import shutil
import subprocess
import sys
import time

import pytest
from conftest import PATIENCE, ROOT, clean_environment, flags_for
from launches import FLAGS, figures, train_in, wait_for

from lessons.elastic import steps_done
from lifecycle import runlog

NAMES = ["head", "second"]
PORT = 29500  # free, since the network is new


class Hosts:
    """Two hosts, as Linux namespaces.

    `start(i, n, *args)` runs torchrun with n ranks on host i, `kill(i)` kills all that runs there,
    `cable("down")` parts the two. A `cat` that reads from this process holds each network, so
    nothing stays behind, however the test ends.
    """

    def __init__(self, folder):
        self.folder = folder
        self.running = {}
        self.logs = {}
        hold = ["unshare", "--net", "cat"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        self.holders = [subprocess.Popen(hold, **pipes) for _ in NAMES]
        self.write_host_files()
        self.wait_for_networks()
        self.lay_cable()

    def write_host_files(self) -> None:
        """Each /etc/hosts. A host's own name leads to a loopback address, as on Debian."""
        for number, name in enumerate(NAMES):
            own = f"127.0.1.1 {name}"
            other = f"10.9.0.{2 - number} {NAMES[1 - number]}"
            (self.folder / f"{name}.hosts").write_text(f"127.0.0.1 localhost\n{own}\n{other}\n")

    def wait_for_networks(self) -> None:
        """Until both holders have left this process's network."""
        ours = os.readlink("/proc/self/ns/net")
        while any(os.readlink(f"/proc/{holder.pid}/ns/net") == ours for holder in self.holders):
            time.sleep(0.01)

    def lay_cable(self) -> None:
        """Connect the two networks, and give each host its address."""
        ends = [["name", "cable", "netns", str(holder.pid)] for holder in self.holders]
        link = ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]]
        subprocess.run(link, check=True)
        for number in range(len(NAMES)):
            self.inside(number, "ip", "address", "add", f"10.9.0.{number + 1}/24", "dev", "cable")
            self.inside(number, "ip", "link", "set", "lo", "up")
        self.cable("up")

    def network(self, number) -> list[str]:
        """The command that enters a host's network."""
        return ["nsenter", f"--net=/proc/{self.holders[number].pid}/ns/net"]

    def inside(self, number, *command) -> None:
        """Run a command in a host's network."""
        subprocess.run([*self.network(number), *command], check=True)

    def cable(self, state) -> None:
        """Set the cable "up" or "down", at both ends."""
        for number in range(len(NAMES)):
            self.inside(number, "ip", "link", "set", "cable", state)

    def start(self, number, n_ranks, *args) -> None:
        """torchrun on this host, the same command on both.

        The host has its own name, process numbers and /etc/hosts.
        """
        name = NAMES[number]
        namespaces = "unshare --uts --mount --pid --fork --kill-child --mount-proc".split()
        mount = f"mount --bind {self.folder}/{name}.hosts /etc/hosts"
        enter = ["sh", "-c", f'hostname {name} && {mount} && exec "$@"', "sh"]
        torchrun = [sys.executable, *"-m torch.distributed.run --nnodes 2 --max-restarts 3".split()]
        torchrun += ["--nproc_per_node", str(n_ranks), "--rdzv_backend", "c10d"]
        torchrun += ["--rdzv_endpoint", f"head:{PORT}"]
        program = [str(ROOT / "fsdp_train.py"), *map(str, args)]
        command = [*self.network(number), *namespaces, *enter, *torchrun, *program]
        interface = {"GLOO_SOCKET_IFNAME": "cable", "NCCL_SOCKET_IFNAME": "cable"}
        env = clean_environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | interface
        log = self.logs[number] = self.folder / f"{name}.log"
        with open(log, "a") as file:
            options = {"stdout": file, "stderr": file, "cwd": self.folder, "env": env}
            self.running[number] = subprocess.Popen(command, **options)

    def kill(self, number) -> None:
        """SIGKILL to each process of the host: the kernel does that when its first process dies."""
        self.running[number].kill()
        self.running.pop(number).wait()

    def wait(self) -> list[int]:
        """The exit statuses of torchrun on both hosts."""
        return [self.running[number].wait(PATIENCE) for number in sorted(self.running)]

    def said(self) -> str:
        """The ends of both logs."""
        return "".join(log.read_text()[-3000:] for log in self.logs.values())

    def close(self) -> None:
        """End all processes and networks."""
        for number in list(self.running):
            self.kill(number)
        for holder in self.holders:
            holder.stdin.close()
            holder.wait()


@pytest.fixture
def hosts(tmp_path):
    """Two hosts, which share the folder tmp_path."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if not shutil.which(tool)]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    try_it = ["unshare", "--net", "--pid", "--fork", "true"]
    if subprocess.run(try_it, capture_output=True).returncode:
        pytest.skip("only root may make network namespaces here")
    two = Hosts(tmp_path)
    yield two
    two.close()


@pytest.mark.parametrize(
    "sharding, per_host, victims",
    [
        pytest.param("FULL_SHARD", 1, (1,), marks=pytest.mark.slow, id="second"),
        pytest.param("HYBRID_SHARD", 2, (0, 1), marks=pytest.mark.long, id="both"),
    ],
)
def test_a_run_on_two_hosts_survives_a_killed_host_and_a_pulled_cable(
    hosts, ranks, tiny_data, tmp_path, sharding, per_host, victims
):
    """torchrun's rendezvous is on the head. If that dies, both fail, and SLURM restarts both.

    When the cable is pulled, no connection is closed: only the watchdog notices. Then torchrun
    restarts the workers. The figures are those of all ranks on one host; there --shard_size=2 does
    what HYBRID_SHARD does by default on two hosts: it shards inside each.
    """
    args = [*FLAGS, *flags_for(tiny_data), "--max_steps=60", "--save_interval=10"]
    args += [f"--sharding={sharding}", "--timeout_minutes=0.2"]
    run = tmp_path / "two"
    for number in (0, 1):
        hosts.start(number, per_host, *args, "--run_dir=two")
    wait_for(lambda: steps_done(run) >= 15 and (run / "checkpoints/step-10").exists())
    for number in victims:
        hosts.kill(number)
    for number in victims:
        hosts.start(number, per_host, *args, "--run_dir=two")

    wait_for(lambda: len(runlog.read_launches(run)) >= 2)
    first, second, *_ = (row["first_step"] for row in runlog.read_launches(run))
    wait_for(lambda: (run / f"checkpoints/step-{second + 10}").exists())
    hosts.cable("down")
    wait_for(lambda: "on second) does not reply" in hosts.logs[0].read_text())
    hosts.cable("up")
    assert hosts.wait() == [0, 0], hosts.said()

    *_, last = (row["first_step"] for row in runlog.read_launches(run))
    assert first == 0 and 10 <= second < last < 60
    inside = ["--shard_size=2"] if sharding == "HYBRID_SHARD" else []
    answers = ranks(2 * per_host)(train_in, tmp_path, [*args, *inside, "--run_dir=one"])
    assert {status for status, *_ in answers} == {0}, answers
    assert figures(run) == figures(tmp_path / "one")

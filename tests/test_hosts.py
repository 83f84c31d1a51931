"""Two hosts, each with a network, a name and processes of its own: Linux namespaces joined by a virtual cable.

They train with torchrun as slurm/train.sbatch starts it, and one of them dies, or its cable is pulled, and comes back.
TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set as there: without it, torchrun (of torch 2.13) does not publish the address of
its store again, and that of a host that comes back waits for it in vain. test_processes.py does without the variable.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
from conftest import PATIENCE, ROOT, clean_environment, flags_for

from lifecycle import runlog

MODEL = [
    "--d_model=32",
    "--n_heads=4",
    "--n_layers=2",
    "--vocab_size=260",
    "--max_seq_len=32",
    "--precision=fp32",
]
BATCH = ["--global_batch_size=8", "--microbatch_size=2", "--warmup_steps=2", "--eval_tokens=2000"]
NAMES = ["head", "second"]
PORT = 29500  # in a network that nobody else is in


class Hosts:
    """`start(i, *args)` runs torchrun on host i, `kill(i)` kills all that runs there, `cable("down")` parts the two.

    What holds a host's network is a `cat` that reads from this process: nothing is left behind however the test ends.
    """

    def __init__(self, folder, ranks_per_host=1):
        self.folder, self.ranks_per_host, self.running, self.logs = folder, ranks_per_host, {}, {}
        hold = ["unshare", "--net", "cat"]
        self.holders = [
            subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in NAMES
        ]
        for number, name in enumerate(
            NAMES
        ):  # their own name is a loopback address to them, as Debian sets it up
            own, other = f"127.0.1.1 {name}", f"10.9.0.{2 - number} {NAMES[1 - number]}"
            (folder / f"{name}.hosts").write_text(f"127.0.0.1 localhost\n{own}\n{other}\n")
        here = os.readlink("/proc/self/ns/net")
        while any(os.readlink(f"/proc/{holder.pid}/ns/net") == here for holder in self.holders):
            time.sleep(0.01)
        ends = [["name", "cable", "netns", str(holder.pid)] for holder in self.holders]
        subprocess.run(
            ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True
        )
        for number in range(len(NAMES)):
            self.inside(number, "ip", "address", "add", f"10.9.0.{number + 1}/24", "dev", "cable")
            self.inside(number, "ip", "link", "set", "lo", "up")
        self.cable("up")

    def network(self, number) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.holders[number].pid}/ns/net"]

    def inside(self, number, *command) -> None:
        subprocess.run([*self.network(number), *command], check=True)

    def cable(self, state) -> None:
        for number in range(len(NAMES)):
            self.inside(number, "ip", "link", "set", "cable", state)

    def start(self, number, *args) -> None:
        """torchrun on this host, with its own name, process numbers and /etc/hosts; on both the same command."""
        of_its_own = [
            "unshare",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        name = NAMES[number]
        enter = (
            f'hostname {name} && mount --bind {self.folder}/{name}.hosts /etc/hosts && exec "$@"'
        )
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc_per_node",
            str(self.ranks_per_host),
        ]
        torchrun += [
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            f"head:{PORT}",
            "--max-restarts",
            "3",
        ]
        command = [
            *self.network(number),
            *of_its_own,
            "sh",
            "-c",
            enter,
            "sh",
            sys.executable,
            *torchrun,
        ]
        command += [str(ROOT / "fsdp_train.py"), *map(str, args)]
        interface = {"GLOO_SOCKET_IFNAME": "cable", "NCCL_SOCKET_IFNAME": "cable"}
        env = clean_environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | interface
        log = self.logs[number] = self.folder / f"{name}.log"
        with open(log, "a") as file:
            options = {"stdout": file, "stderr": file, "cwd": self.folder, "env": env}
            self.running[number] = subprocess.Popen(command, **options)

    def kill(self, number) -> None:
        """Each process of the host, by SIGKILL: the kernel does so when the first one of its process numbers goes."""
        self.running[number].kill()
        self.running.pop(number).wait()

    def wait(self) -> list[int]:
        """The exit statuses of torchrun on both hosts."""
        return [self.running[number].wait(PATIENCE) for number in sorted(self.running)]

    def says(self, number, words, seconds=60) -> bool:
        """Wait until these words are in the host's log."""
        deadline = time.monotonic() + seconds
        while words not in self.logs[number].read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        return words in self.logs[number].read_text()

    def said(self) -> str:
        return "".join(log.read_text()[-3000:] for log in self.logs.values())

    def close(self) -> None:
        for number in list(self.running):
            self.kill(number)
        for holder in self.holders:
            holder.stdin.close()
            holder.wait()


@pytest.fixture
def hosts(tmp_path):
    """`hosts(ranks_per_host)`: two hosts, which share tmp_path and where run folders are made."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if not shutil.which(tool)]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    if subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "true"], capture_output=True
    ).returncode:
        pytest.skip("only root may make network namespaces here")
    made = []
    yield lambda ranks_per_host=1: made.append(Hosts(tmp_path, ranks_per_host)) or made[0]
    for each in made:
        each.close()


def figures(run_dir) -> dict:
    """step -> what does not depend on the machine's speed; validation at step 0 and the end."""
    keys = ("loss", "grad_norm", "lr", "tokens", "batch_hash", "val_loss")
    return {
        (row["step"], "loss" in row): [row.get(key) for key in keys] for row in runlog.read(run_dir)
    }


def on_one_host(tmp_path, ranks, *args) -> dict:
    """The figures of the same run without a second host, and without torchrun, which takes seconds to start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, str(ROOT / "fsdp_train.py"), *map(str, args), "--run_dir=one"]
    processes = []
    for rank in map(str, range(ranks)):
        who = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        env = clean_environment() | meeting | who
        processes.append(
            subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
        )
    assert [process.wait(PATIENCE) for process in processes] == [0] * ranks
    return figures(tmp_path / "one")


def starts(run_dir) -> list[int]:
    """The step at which each launch began."""
    return [
        json.loads(line)["first_step"]
        for line in (run_dir / "launches.jsonl").read_text().splitlines()
    ]


def step_reached(run_dir, step, seconds=60) -> bool:
    """Wait until metrics.jsonl has this step."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and any(
            row["step"] >= step for row in runlog.read(run_dir)
        ):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_two_hosts_train_as_one_does(hosts, tiny_data, tmp_path):
    args = [*MODEL, *BATCH, *flags_for(tiny_data), "--max_steps=6"]
    two = hosts()
    for number in (0, 1):
        two.start(number, *args, "--run_dir=two")
    assert two.wait() == [0, 0], two.said()
    assert figures(tmp_path / "two") == on_one_host(tmp_path, 2, *args)


@pytest.mark.slow
def test_four_ranks_on_two_hosts_shard_inside_a_host(hosts, tiny_data, tmp_path):
    """HYBRID_SHARD puts a host's ranks into one group by itself: the same run as that told so on one host."""
    args = [*MODEL, *BATCH, *flags_for(tiny_data), "--max_steps=6", "--sharding=HYBRID_SHARD"]
    two = hosts(ranks_per_host=2)
    for number in (0, 1):
        two.start(number, *args, "--run_dir=two")
    assert two.wait() == [0, 0], two.said()
    assert figures(tmp_path / "two") == on_one_host(tmp_path, 4, *args, "--shard_size=2")


LONGER = ["--max_steps=40", "--save_interval=10"]


@pytest.mark.slow
@pytest.mark.parametrize("victims", [(1,), (0, 1)], ids=["second", "both"])
def test_a_host_is_killed_and_comes_back(hosts, tiny_data, tmp_path, victims):
    """The head has torchrun's rendezvous: the second one's torchrun fails with it, and SLURM starts both again."""
    args = [*MODEL, *BATCH, *LONGER, *flags_for(tiny_data)]
    two = hosts()
    for number in (0, 1):
        two.start(number, *args, "--run_dir=two")
    assert step_reached(tmp_path / "two", 15), two.said()
    for number in victims:
        two.kill(number)
    for number in victims:
        two.start(number, *args, "--run_dir=two")
    assert two.wait() == [0, 0], two.said()
    assert figures(tmp_path / "two") == on_one_host(tmp_path, 2, *args)
    first, second = starts(tmp_path / "two")
    assert first == 0 and 10 <= second < 40


@pytest.mark.slow
def test_the_cable_is_pulled_until_the_hosts_give_each_other_up(hosts, tiny_data, tmp_path):
    """Nobody closes a connection: only the watch sees that no step is taken. torchrun then starts the workers again."""
    args = [*MODEL, *BATCH, *LONGER, *flags_for(tiny_data)]
    two = hosts()
    for number in (0, 1):
        two.start(number, *args, "--run_dir=two", "--timeout_minutes=0.2")
    assert step_reached(tmp_path / "two", 15), two.said()
    two.cable("down")
    assert two.says(0, "on second) does not reply"), two.said()
    two.cable("up")
    assert two.wait() == [0, 0], two.said()
    assert figures(tmp_path / "two") == on_one_host(tmp_path, 2, *args)
    assert starts(tmp_path / "two")[0] == 0 and len(starts(tmp_path / "two")) > 1

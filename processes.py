"""How the ranks of a run find each other when they start, and what ends them when that, or their launcher, fails.

    torchrun's store, or rank 0's    a key-value server (PyTorch's TCPStore) at MASTER_ADDR:MASTER_PORT
    meet                             each rank signs in there; together they get a name that no earlier start had
    PrefixStore(name, store)         what the ranks write from here on, such as gloo's addresses, is kept under the name

torchrun keeps its store when it starts killed ranks again: without a name of their own they would read the addresses of
the killed ones. TORCHELASTIC_RESTART_COUNT cannot be that name: each machine of a run counts its own restarts.

Run `torchrun --nproc_per_node 2 processes.py` to see two ranks meet. Read next: parallel.py.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

import config
from config import UserError, require
from startup import RESUME_ME

MEETING = 120  # seconds in which all ranks have to meet
POLL = 0.1  # seconds between two looks into the store


def join(backend: str, rank: int, size: int, timeout: timedelta) -> None:
    """torch.distributed's init_process_group for this rank of `size`. `timeout`: of a collective.

    If the ranks do not meet in time this one ends with RESUME_ME and a line. UserError if the address is wrong.
    """
    group = {"backend": backend, "rank": rank, "world_size": size, "timeout": timeout}
    if size == 1:
        dist.init_process_group(store=dist.HashStore(), **group)
        return
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    known = host and port and port.isdigit()
    require(known, "WORLD_SIZE is set, but not MASTER_ADDR and MASTER_PORT: set them, or start with torchrun")
    with in_time("connect to the others"):
        deadline = time.monotonic() + MEETING
        try:
            store = open_store(host, int(port), rank)
            name = meet(store, rank, size, deadline)
        except dist.DistError as error:
            say(f"{whoami(rank)} cannot meet the others at {host}:{port}: {config.one_line(error)}")
            raise SystemExit(RESUME_ME) from error
        store.set_timeout(timeout)
        dist.init_process_group(store=dist.PrefixStore(name, store), **group)


def open_store(host: str, port: int, rank: int) -> dist.Store:
    """torchrun's store, if it has one; else rank 0 is the server. UserError if its port is taken."""
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not of_torchrun
    options = {"timeout": timedelta(seconds=MEETING), "wait_for_workers": False, "multi_tenant": serves}
    try:
        return dist.TCPStore(host, port, is_master=serves, **options)
    except dist.DistError as error:
        if serves and "EADDRINUSE" in str(error):
            raise UserError(f"port {port} on {platform.node()} is in use: set MASTER_PORT to a free one") from error
        raise


def meet(store: dist.Store, rank: int, size: int, deadline: float) -> str:
    """Wait for all ranks; the name of their group. SystemExit, after a line that says who is missing, if not all come.

    Rank 0 makes up the name. The others sign in under it, and rank 0 publishes the signatures. A rank that read an old
    name, or whose predecessor signed, does not find its own signature there: it waits for the next name.
    """
    signature = uuid.uuid4().hex
    if rank == 0:
        call_together(store, signature, size, deadline)
        return signature
    signed = None
    while time.monotonic() < deadline:
        name = store.get("group").decode() if store.check(["group"]) else None
        if name != signed:
            store.set(f"{name} rank {rank}", signature)
            signed = name
        if name and store.check([f"{name} met"]):
            met = json.loads(store.get(f"{name} met"))
            if met["signatures"].get(str(rank)) == signature:
                if met["missing"]:
                    raise SystemExit(RESUME_ME)  # rank 0 says who
                return name
        time.sleep(POLL)
    say(f"{whoami(rank)} waited {MEETING} s in vain at {store.host}:{store.port}: rank 0 did not answer")
    raise SystemExit(RESUME_ME)


def call_together(store: dist.Store, name: str, size: int, deadline: float) -> None:
    """Rank 0's part of `meet`."""
    store.set("group", name)
    keys = {rank: f"{name} rank {rank}" for rank in range(1, size)}
    while not store.check(list(keys.values())) and time.monotonic() < deadline:
        time.sleep(POLL)
    there = {rank: key for rank, key in keys.items() if store.check([key])}
    signatures = dict(zip(there, map(bytes.decode, store.multi_get(list(there.values()))), strict=True))
    missing = sorted(set(keys) - set(there))
    store.set(f"{name} met", json.dumps({"signatures": signatures, "missing": missing}))
    if missing:
        time.sleep(10 * POLL)  # until the others have read it: the server may be in this process
        who = f"{len(missing)} of {size} ranks: {', '.join(map(str, missing[:20]))}{' ...' * (len(missing) > 20)}"
        say(f"{whoami(0)} waited {MEETING} s in vain at {store.host}:{store.port} for {who}")
        raise SystemExit(RESUME_ME)


def new_group(timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks. They may come at different times, but then connect in time. A collective."""
    if dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1))
    with in_time("connect a new group"):
        return dist.new_group(backend="gloo", timeout=timeout)


@contextlib.contextmanager
def in_time(what: str):
    """Around what all ranks do at the same time: if it takes too long, one of them is gone, and this rank ends."""
    words = f"{whoami(config.rank())} could not {what} in {MEETING} s: a rank is gone, or the network is down"
    timer = threading.Timer(MEETING + 2, end, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end(words: str) -> None:
    """End this rank, from any thread."""
    say(words)
    sys.stdout.flush()
    os._exit(RESUME_ME)


def say(words: str) -> None:
    print(f"error: {words}", file=sys.stderr, flush=True)


def whoami(rank: int) -> str:
    return f"rank {rank} (process {os.getpid()} on {platform.node()})"


def end_with_torchrun() -> None:
    """If torchrun started this process, end soon after torchrun: nobody would start lost ranks again, or end these.

    A process that is on its own is left alone: its parent is a shell, which may leave (nohup, disown).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=look_for_parent, args=(os.getppid(),), daemon=True).start()


def look_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    end(f"{whoami(config.rank())} ends, since torchrun (process {parent}) is gone")


def slurm_variables() -> dict[str, str]:
    """What torchrun would set, for a process that srun started. UserError if the first node is not known."""
    env = os.environ
    if "RANK" in env or int(env.get("SLURM_NTASKS", 1)) == 1 or "SLURM_PROCID" not in env:
        return {}
    size, nodes = env["SLURM_NTASKS"], int(env.get("SLURM_NNODES", 1))
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(int(size) // nodes),
        "MASTER_ADDR": env.get("MASTER_ADDR") or slurm_first_host(),
        # Below 32768, where Linux begins to hand out ports of its own choice.
        "MASTER_PORT": env.get("MASTER_PORT") or str(20000 + int(env.get("SLURM_JOB_ID", 0)) % 12000),
    }


def slurm_first_host() -> str:
    try:
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (KeyError, OSError, subprocess.CalledProcessError, IndexError) as error:
        raise UserError("cannot ask SLURM for the first node: set MASTER_ADDR to its name") from error


def demonstrate(argv) -> None:
    require("RANK" in os.environ, "one process meets nobody: torchrun --nproc_per_node 2 processes.py")
    begin = time.monotonic()
    join("gloo", config.rank(), int(os.environ["WORLD_SIZE"]), timedelta(seconds=MEETING))
    print(f"{whoami(config.rank())} met the others within {time.monotonic() - begin:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    config.run(demonstrate)

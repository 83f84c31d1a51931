"""How several ranks find each other.

    open_store    a key-value server (PyTorch's TCPStore): torchrun's, or else one in rank 0
    meet          all ranks sign in there, and agree on a random name for this start
    Heartbeat     a thread, from then on: it ends the run if a rank is gone (heartbeat.py)
    join          later keys in the store, such as gloo's addresses, have that name as their prefix

torchrun keeps its store when it starts killed ranks again: without a name of their own the new
ranks would read the addresses of the killed ones. TORCHELASTIC_RESTART_COUNT cannot be that name:
each machine of a run counts its own restarts.
"""

import json
import os
import platform
import subprocess
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

import program
from launch import heartbeat
from launch.heartbeat import Heartbeat
from program import RESUME_ME, UserError, require, whoami

MEETING = 120  # seconds in which all ranks have to meet
POLL = 0.1  # seconds between two looks into the store


def join(group: dict) -> None:
    """init_process_group(**group) for this rank, which is one of several.

    If they do not meet in time, this rank ends with RESUME_ME and a line. Raises UserError if the
    address is missing or taken.
    """
    rank, size = group["rank"], group["world_size"]
    if "RANK" not in os.environ:  # srun started this process
        os.environ |= slurm_variables(*program.read_launcher())
    host, port = os.environ.get("MASTER_ADDR"), program.read_number("MASTER_PORT", 0)
    require(
        host and 0 < port < 2**16,
        f"MASTER_ADDR={host or ''} and MASTER_PORT={port} are not the address of rank 0: set both, "
        "or start with torchrun",
    )
    where = f"{host}:{port}"
    beats = Heartbeat(rank, size, patience=MEETING / 2)
    beats.start()
    try:
        # Later than `meet`, which knows more, even if rank 0 is a whole meeting late.
        with heartbeat.within(f"meet the others at {where}", 3 * MEETING):
            store = open_store(host, port, rank)
            name = meet(store, rank, size, MEETING)
            store = dist.PrefixStore(name, store)
            beats.connect(lambda port: tell_port(store, port))
    except dist.DistError as error:
        why = program.one_line(error)
        program.print_error(f"{whoami(rank)} cannot meet the others at {where}: {why}")
        raise SystemExit(RESUME_ME) from error
    with heartbeat.within(f"connect to all other ranks at {where}"):
        store.set_timeout(group["timeout"])
        dist.init_process_group(store=store, **group)
        # Without this a rank might end, for an error, while others still connect to it.
        dist.all_reduce(torch.zeros(1))


def tell_port(store: dist.Store, port: int) -> int:
    """The port of the heartbeat's server, which rank 0 gives and the others (port 0) wait for."""
    if port:
        store.set("port", str(port))
    return port or int(store.get("port"))


def open_store(host: str, port: int, rank: int) -> dist.Store:
    """torchrun's store if it shares one, else rank 0 serves one. UserError if its port is taken."""
    serves = rank == 0 and not torchrun_serves()
    patience = timedelta(seconds=MEETING)
    options = {"timeout": patience, "wait_for_workers": False, "multi_tenant": serves}
    try:
        return dist.TCPStore(host, port, is_master=serves, **options)
    except dist.DistError as error:
        require(
            not serves or "EADDRINUSE" not in str(error),
            f"port {port} on {platform.node()} is in use: set MASTER_PORT to a free one",
        )
        raise


def torchrun_serves() -> bool:
    """Does torchrun serve the store? Else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(store: dist.Store, rank: int, size: int, patience: float) -> str:
    """Wait for all ranks; returns the name of this start. If one is missing: a line, SystemExit.

    Rank 0 draws the name. The others sign in under it, each with a random signature, and rank 0
    publishes the signatures. A rank trusts a name only if its own signature is published under it.
    So one that has read the name of an earlier start, or whose place a killed process had taken,
    waits for the next name.

    patience: seconds that rank 0 waits. The others wait 1.25 times as long, counted from when they
    last saw a new name: only rank 0 knows who is missing.
    """
    signature = uuid.uuid4().hex
    if rank == 0:
        publish_meeting(store, signature, size, patience)
        return signature
    signed_name = None
    deadline = time.monotonic() + 1.25 * patience
    while time.monotonic() < deadline:
        name = store.get("group").decode() if store.check(["group"]) else None
        if name != signed_name:
            store.set(f"{name} rank {rank}", signature)
            signed_name = name
            deadline = time.monotonic() + 1.25 * patience
        if name and store.check([f"{name} met"]):
            meeting = json.loads(store.get(f"{name} met"))
            if meeting["signatures"].get(str(rank)) == signature:
                if meeting["missing"]:
                    raise SystemExit(RESUME_ME)  # rank 0 prints who
                return name
        time.sleep(POLL)
    waited = f"{whoami(rank)} waited {1.25 * patience:g} s at {store.host}:{store.port}"
    program.print_error(f"{waited}, but rank 0 does not answer")
    raise SystemExit(RESUME_ME)


def publish_meeting(store: dist.Store, name: str, size: int, patience: float) -> None:
    """Rank 0's part of `meet`."""
    store.set("group", name)
    keys = {rank: f"{name} rank {rank}" for rank in range(1, size)}
    deadline = time.monotonic() + patience
    while not store.check(list(keys.values())) and time.monotonic() < deadline:
        time.sleep(POLL)
    present = [rank for rank in keys if store.check([keys[rank]])]
    signatures = {rank: store.get(keys[rank]).decode() for rank in present}
    missing = [rank for rank in keys if rank not in signatures]
    if missing:  # said before the others read it: they end, and torchrun then ends this rank
        names = ", ".join(map(str, missing[:20])) + ", ..." * (len(missing) > 20)
        waited = f"{whoami(0)} waited {patience:g} s at {store.host}:{store.port}"
        program.print_error(f"{waited} for {len(missing)} of {size} ranks: {names}")
    store.set(f"{name} met", json.dumps({"signatures": signatures, "missing": missing}))
    if missing:
        time.sleep(10 * POLL)  # until the others have read it: the server may be in this process
        raise SystemExit(RESUME_ME)


def slurm_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """What torchrun would set, for a process that srun started: see `program.read_launcher`.

    Raises UserError if the first node cannot be determined.
    """
    env = os.environ
    # Below 32768, where Linux begins to hand out ports of its own choice.
    port = 20000 + program.read_number("SLURM_JOB_ID", 0) % 12000
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": env.get("MASTER_ADDR") or slurm_first_host(),
        "MASTER_PORT": env.get("MASTER_PORT") or str(port),
    }


def slurm_first_host() -> str:
    """The name of the job's first node, where rank 0 runs. UserError if SLURM does not tell."""
    try:
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return found.stdout.split()[0]
    except (KeyError, OSError, subprocess.CalledProcessError, IndexError) as error:
        message = "cannot ask SLURM for the first node: set MASTER_ADDR to its name"
        raise UserError(message) from error

"""How several ranks find each other, and from then on notice if one is gone.

    open_store    a key-value server (PyTorch's TCPStore): torchrun's, or else one in rank 0
    meet          all ranks sign in there, and agree on a random name for this start
    RollCall      a thread, from then on: it ends the run if a rank stands still
    join          later keys in the store, such as gloo's addresses, have that name as their prefix

torchrun keeps its store when it starts killed ranks again: without a name of their own the new
ranks would read the addresses of the killed ones. TORCHELASTIC_RESTART_COUNT cannot be that name:
each machine of a run counts its own restarts.
"""

import contextlib
import json
import os
import platform
import subprocess
import threading
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

import program
from program import RESUME_ME, UserError, end, require, whoami

MEETING = 120  # seconds in which all ranks have to meet
POLL = 0.1  # seconds between two looks into the store
REPLY_TIMEOUT = 5  # seconds in which a thread of a living rank replies
SHOWN = 8  # of many silent ranks, as many as a node has are named


def join(group: dict) -> None:
    """init_process_group(**group) for this rank, which is one of several.

    If they do not meet in time, this rank ends with RESUME_ME and a line. Raises UserError if the
    address is missing or taken.
    """
    rank, size = group["rank"], group["world_size"]
    host, port = os.environ.get("MASTER_ADDR"), program.number("MASTER_PORT", 0)
    require(
        host and 0 < port < 2**16,
        f"MASTER_ADDR={host or ''} and MASTER_PORT={port} are not the address of rank 0: set both, "
        "or start with torchrun",
    )
    where = f"{host}:{port}"
    try:
        # Later than `meet`, which knows more, even if rank 0 is a whole meeting late.
        with in_time(f"meet the others at {where}", 3 * MEETING):
            store = open_store(host, port, rank)
            name = meet(store, rank, size, MEETING)
            own_store = open_store(host, port, rank)  # at the other one the main thread may wait
    except dist.DistError as error:
        why = program.one_line(error)
        program.print_error(f"{whoami(rank)} cannot meet the others at {where}: {why}")
        raise SystemExit(RESUME_ME) from error
    RollCall(dist.PrefixStore(name, own_store), where, rank, size).start()
    with in_time(f"connect to all other ranks at {where}"):
        store.set_timeout(group["timeout"])
        dist.init_process_group(store=dist.PrefixStore(name, store), **group)
        # Without this a rank might end, for an error, while others still connect to it.
        dist.all_reduce(torch.zeros(1))


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


class SignsOfLife:
    """How long this rank has seen no change in the counts of others.

    Each rank counts in a store, every `interval` seconds. A count, not a time of day: machines'
    clocks differ. Rank 0 looks at all others and these look at rank 0, so the work of a rank stays
    small.
    """

    def __init__(self, global_rank: int, global_size: int, interval: float = 1):
        ranks = range(1, global_size) if global_rank == 0 else [0]
        self.interval = interval
        self.counts = dict.fromkeys(ranks, 0)
        self.silence = dict.fromkeys(ranks, 0.0)  # seconds
        self.last_look = time.monotonic()

    def look(self, counts: dict[int, int] | None, now: float) -> None:
        """Note the counts of the others, None if the store does not reply. now: monotonic."""
        # If more time has passed than that, this rank itself was held up, and perhaps the store.
        longest = self.interval + (REPLY_TIMEOUT if counts is None else 1)
        seconds = min(now - self.last_look, longest)
        self.last_look = now
        before, self.counts = self.counts, counts or self.counts
        for rank, count in self.counts.items():
            alive = count != before[rank] or count < 0
            self.silence[rank] = 0.0 if alive else self.silence[rank] + seconds

    def gone(self, patience: float) -> list[int]:
        """The ranks without a sign of life for so many seconds."""
        return [rank for rank, seconds in self.silence.items() if seconds >= patience]


class RollCall(threading.Thread):
    """From the meeting on: if a rank gives no sign of life, name it and end all others.

    Without this thread they would wait for the timeout of a collective. In the training loop the
    watchdog takes over, which notices it in half of the time.
    """

    def __init__(self, store: dist.Store, where: str, rank: int, size: int):
        """store: only this thread uses it. where: its address."""
        super().__init__(daemon=True)
        self.store, self.where, self.rank = store, where, rank
        self.patience = MEETING / 2
        self.signs = SignsOfLife(rank, size, interval=self.patience / 12)
        self.ended = threading.Event()

    def run(self) -> None:
        """Until `end_roll_call`, or until another rank is silent."""
        with contextlib.suppress(dist.DistError):  # no server: collectives will fail as well
            self.store.set(f"name {self.rank}", whoami(self.rank))
            while not self.ended.wait(self.signs.interval):
                # If the server stands still, so does rank 0. torchrun may, as after Ctrl-Z.
                words = f"no sign of life for {self.patience:g} s: rank 0 at {self.where} is silent"
                timer = threading.Timer(self.patience, self.leave, [words])
                timer.daemon = True
                if not torchrun_serves():
                    timer.start()
                self.exchange()
                timer.cancel()
                if self.store.check(["over"]):  # another rank says why
                    self.leave()
                if gone := self.signs.gone(self.patience):
                    names = [self.name(rank) for rank in gone[:SHOWN]]
                    is_first = self.store.add("over", 1) == 1
                    self.leave(silence_of(names, len(gone), self.patience) * is_first)

    def exchange(self) -> None:
        """Give a sign of life, and look at the others' counts."""
        self.store.add(f"count {self.rank}", 1)
        counts = {rank: self.store.add(f"count {rank}", 0) for rank in self.signs.counts}
        self.signs.look(counts, time.monotonic())

    def name(self, rank: int) -> str:
        """A rank in words, as it has published them."""
        key = f"name {rank}"
        return self.store.get(key).decode() if self.store.check([key]) else f"rank {rank}"

    def leave(self, words: str = "") -> None:
        """End this process, with a line if no other rank has one.

        When the first one ends, collectives of the others fail. So each waits until all know, and
        its main thread has no say.
        """
        if words:
            program.print_error(words)
        program.flushed(RESUME_ME)
        program.silence()
        time.sleep(self.signs.interval + 3)
        os._exit(RESUME_ME)


def end_roll_call() -> None:
    """From now on other ranks may end before this one."""
    for thread in threading.enumerate():
        if isinstance(thread, RollCall):
            thread.ended.set()


def silence_of(names: list[str], number: int, patience: float) -> str:
    """What to say of `number` silent ranks. names: of the first SHOWN."""
    more = f" and {number - SHOWN} more ranks" * (number > SHOWN)
    silent = ", ".join(names) + more
    return f"no sign of life for {patience:g} s: {silent} died, stopped, or cannot be reached"


@contextlib.contextmanager
def in_time(what: str, seconds: float | None = None):
    """Give the ranks this long to do something together. After that: a line, and RESUME_ME.

    Otherwise a rank would wait for the address of a dead one until the timeout of a collective.
    seconds: the default is later than `RollCall`, which knows who is missing.
    """
    seconds = seconds or MEETING + 5
    me = whoami(program.rank())
    words = f"{me} could not {what} in {seconds:g} s: a rank or the network is gone"
    timer = threading.Timer(seconds, end, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def slurm_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """What torchrun would set, for a process that srun started: see `program.place`.

    Raises UserError if the first node cannot be determined.
    """
    env = os.environ
    # Below 32768, where Linux begins to hand out ports of its own choice.
    port = 20000 + program.number("SLURM_JOB_ID", 0) % 12000
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

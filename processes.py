"""The ranks of a run: how they start, find each other, agree, and end.

    start         a rank learns who it is, picks its device and joins the others
    open_store    a key-value server (PyTorch's TCPStore): torchrun's, or else one in rank 0
    meet          all ranks sign in there, and agree on a random name for this start
    RollCall      a thread, from then on: it ends the run if a rank stands still
    join          later keys in the store, such as gloo's addresses, have that name as their prefix
    Pool          processes on this machine that are ranks of their own, and answer calls
    run           calls a program's main and ends the rank with an exit status, whatever happens

torchrun keeps its store when it starts killed ranks again: without a name of their own the new
ranks would read the addresses of the killed ones. TORCHELASTIC_RESTART_COUNT cannot be that name:
each machine of a run counts its own restarts.

Run `torchrun --nproc_per_node 2 processes.py` to see two ranks meet.
"""

import contextlib
import ctypes
import json
import multiprocessing.connection
import os
import pickle
import platform
import random
import signal
import socket
import subprocess
import textwrap
import threading
import time
import traceback
import uuid
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

import devices
import program
from program import RESUME_ME, UserError, end, end_with_torchrun, out_of_memory, require, whoami

MEETING = 120  # seconds in which all ranks have to meet
POLL = 0.1  # seconds between two looks into the store
REPLY_TIMEOUT = 5  # seconds in which a thread of a living rank replies
SHOWN = 8  # of many silent ranks, as many as a node has are named
TIMEOUT = timedelta(minutes=60)  # of one collective: a rank that waits longer fails


# -------------------------------------------------------------------------------------------------
# Who and where


@dataclass
class World:
    """The ranks of a run, as one of them sees them. A rank is one process with one device.

    global_rank of global_size    all processes of the run
    local_rank of local_size      those on this machine
    dp_rank of dp_size            data-parallel: each reads rows of its own
    tp_rank of tp_size            tensor-parallel: together they hold one copy of some layers
    pp_rank of pp_size            pipeline-parallel: the stages, each with some of the layers.
                                  Tensor ranks and stages read the same rows, so they have the same
                                  dp_rank
    """

    global_rank: int
    global_size: int
    local_rank: int
    local_size: int
    device: torch.device
    dp_rank: int | None = None  # if not given: global_rank, and dp_size is global_size
    dp_size: int | None = None
    dp_group: dist.ProcessGroup | None = None  # what dp_sum adds up; None: all, or this one alone
    tp_rank: int = 0
    tp_size: int = 1
    tp_group: dist.ProcessGroup | None = None  # None: this rank alone
    pp_rank: int = 0
    pp_size: int = 1
    pp_group: dist.ProcessGroup | None = None  # None: this rank alone
    timeout: timedelta = TIMEOUT  # of a collective

    def __post_init__(self):
        if self.dp_size is None:
            self.dp_rank, self.dp_size = self.global_rank, self.global_size


def start(
    device_type: str = "auto", timeout: timedelta | None = None, tp: int = 1, pp: int = 1
) -> World:
    """Join the other processes. Works under torchrun, under srun without torchrun, and alone.

    device_type: auto, cpu, cuda (ROCm too) or mps. Raises UserError if that device is not there.
    tp: how many ranks share a layer by tensor parallelism. pp: how many stages share the layers.
    timeout: of one collective, given by a program whose own watchdog acts earlier. Then that
    watchdog deals with failed collectives of NCCL, too; else NCCL ends the process.
    """
    rank, size, local_rank, local_size = program.place()
    if size > 1 and "RANK" not in os.environ:  # srun started this process
        os.environ |= slurm_variables(rank, size, local_rank, local_size)
    join_freed_gpu_memory()
    device = pick_device(device_type, local_rank, local_size, size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # nccl is RCCL on ROCm
    if not dist.is_initialized():  # a benchmark calls this once for each of its rows
        if timeout:
            quiet_nccl(timeout)
        join(backend, rank, size, timeout or TIMEOUT)
    if device.type == "cpu":
        keep_freed_memory()
    world = World(rank, size, local_rank, local_size, device, timeout=timeout or TIMEOUT)
    return in_grid(world, tp, pp)


def in_grid(world: World, tp: int, pp: int = 1) -> World:
    """The same world, whose ranks form a grid of pp stages x data-parallel ranks x tp tensor ranks.

    Launchers number the ranks of a node in a row. So tensor ranks, which talk most, are neighbours,
    and stages, which talk least, are far apart. A collective. UserError if the ranks do not fill
    the grid.
    """
    if tp * pp == 1:
        return world
    size = world.global_size
    if size % (tp * pp) != 0:
        fix = f"start a multiple of {tp * pp}, or change --tp and --pp"
        message = f"{size} ranks cannot form a grid of tp {tp} x pp {pp}: {fix}"
        raise UserError(message, on_all_ranks=True)
    grid = torch.arange(size).view(pp, -1, tp)
    pp_rank, dp_rank, tp_rank = (grid == world.global_rank).nonzero()[0].tolist()
    with in_time("connect the grid of ranks"):
        pp_group = None
        if pp > 1:
            pp_group = group_of(grid[:, dp_rank, tp_rank].tolist(), world.timeout)
        dp_group = group_along(grid[pp_rank, :, tp_rank], world)
        tp_group = group_along(grid[pp_rank, dp_rank], world)
    return replace(
        world,
        dp_rank=dp_rank,
        dp_size=grid.shape[1],
        dp_group=dp_group,
        tp_rank=tp_rank,
        tp_size=tp,
        tp_group=tp_group,
        pp_rank=pp_rank,
        pp_size=pp,
        pp_group=pp_group,
    )


def group_along(line: torch.Tensor, world: World) -> dist.ProcessGroup | None:
    """The group of the ranks on a line of the grid, this one among them; None if it is alone."""
    if len(line) == 1:
        return None
    if len(line) == world.global_size:
        return dist.group.WORLD
    return group_of(line.tolist(), world.timeout)


def group_of(ranks, timeout: timedelta) -> dist.ProcessGroup:
    """A group of some ranks, this one among them. Only they call it, and wait for one another.

    torch's init_device_mesh makes all groups in turn, while every rank waits for each. Here torch
    names a group after its ranks and the number of groups that this rank is in already: it must be
    the same on all ranks of a group.
    """
    return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)


def pick_device(device_type: str, local_rank: int, local_size: int, size: int) -> torch.device:
    """The device of this rank, the `local_rank`-th of `local_size` on this machine, `size` in all.

    Several ranks on a Mac use the CPU: MPS has no collectives. A rank that sees one GPU takes it:
    srun may show each rank a different one, and if not, NCCL says so. Raises
    UserError if the ranks see several, but too few.
    """
    there = "cpu"
    if torch.accelerator.is_available():
        there = torch.accelerator.current_accelerator().type
    if there == "cpu" and device_type in ("auto", "cuda"):
        devices.note_unused_gpu(device_type, size)
    if device_type == "auto":
        device_type = "cpu" if there == "mps" and size > 1 else there
    require(
        device_type in ("cpu", there),
        f"device={device_type}, but this machine has {there}: set --device={there}",
    )
    require(
        device_type != "mps" or size == 1,
        "MPS has no collectives: start one process, or set --device=cpu",
    )
    if device_type != "cuda":
        return torch.device(device_type)
    count = torch.cuda.device_count()
    require(
        count == 1 or max(local_size, local_rank + 1) <= count,
        f"{local_size} ranks of this machine share {count} GPUs: start one rank per GPU, as with "
        f"--nproc_per_node={count}",
    )
    device = torch.device("cuda", 0 if count == 1 else local_rank)
    devices.open_gpu(device)
    return device


def quiet_nccl(timeout: timedelta) -> None:
    """Let our watchdog decide what follows when a collective of NCCL fails.

    NCCL reads these variables when a group is made. What the user has set stays. timeout: of one
    collective.
    """
    env = os.environ
    # Otherwise NCCL's watchdog aborts this process (SIGABRT, 134) as soon as the connection to a
    # lost rank breaks, before ours can say which rank that is.
    if "NCCL_ASYNC_ERROR_HANDLING" not in env:  # its older name
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # It also aborts when its own thread stands still, such as in a driver that hangs: later than
    # ours would.
    env.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(timeout.total_seconds())))


def join_freed_gpu_memory() -> None:
    """On NVIDIA, let freed pieces of GPU memory become a larger one, unless the user says how.

    It must come before CUDA starts, since PyTorch's allocator reads the variable once. Processes
    that this one starts inherit it.
    """
    # PyTorch 2.9 reads only the second name, later versions both. ROCm keeps its default: there
    # older versions of PyTorch ignore this setting, and users of newer ones report crashes.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if torch.version.cuda and not any(name in os.environ for name in names):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def keep_freed_memory() -> None:
    """Tell glibc to keep freed buffers.

    Otherwise each step returns its memory to the kernel, and faults it in again.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


# -------------------------------------------------------------------------------------------------
# Meeting


def join(backend: str, rank: int, size: int, timeout: timedelta) -> None:
    """init_process_group for this rank of `size`. `timeout`: of one collective.

    If the ranks do not meet in time, this one ends with RESUME_ME and a line. Raises UserError if
    the address is missing or taken.
    """
    group = {"backend": backend, "rank": rank, "world_size": size, "timeout": timeout}
    if size == 1:
        dist.init_process_group(store=dist.HashStore(), **group)
        return
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
        store.set_timeout(timeout)
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


def new_group(timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks, for a thread beside the main one. A collective, to which the ranks
    may come at different times."""
    if dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1))  # wait for all: a rank that is late after this is lost
    with in_time("connect a new group"):
        return dist.new_group(backend="gloo", timeout=timeout)


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


# -------------------------------------------------------------------------------------------------
# Starting ranks on this machine


def free_port() -> int:
    """A port of this machine at which no process listens now.

    Below 32768: above, Linux picks ports for outgoing connections, which may take it meanwhile.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("no free port between 20000 and 32000")


def torchrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun would set for one of `size` processes that are all on this machine.

    Rank 0 serves the store at `port` itself, whether or not there is a torchrun around us.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


class PoolError(Exception):
    """A process of a pool failed or died. The text says why in a few words.

    details: its traceback, if it had one.
    """

    def __init__(self, words: str, details: str = ""):
        super().__init__(words)
        self.details = details


class Pool:
    """`size` processes on this machine that call functions for this one.

        pool = Pool(4, start, x)     each process is a rank, as under torchrun, and calls start(x)
        pool(function, y)            [function(started, y) of rank 0, of rank 1, ...], where
                                     `started` is what start(x) returned there
        pool.stop()

    If one fails, all end: the others may wait for it in a collective. They end with this process.
    A failure of `start` shows in the first call.
    threads: of each process. environment: variables besides torchrun's. method: how multiprocessing
    starts a process.
    """

    def __init__(
        self, size: int, start, *args, threads: int = 1, environment=None, method: str = "spawn"
    ):
        port = free_port()
        self.processes, self.pipes = [], []
        self.ended = ""  # why, once it has
        context = multiprocessing.get_context(method)
        for rank in range(size):
            ours, theirs = context.Pipe()
            variables = torchrun_variables(rank, size, port) | dict(environment or {})
            job = theirs, variables, threads, start, args
            process = context.Process(target=serve, args=job, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def __call__(self, function, *args, patience: float | None = None) -> list:
        """Call `function(started, *args)` on all ranks; the results, by rank.

        function: one that can be imported. PoolError if it fails on one rank, or if they take more
        than `patience` seconds.
        """
        if self.ended:
            raise PoolError(self.ended)
        call = pickle.dumps((function, args))
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # the process is gone, as `receive` will find
                pipe.send_bytes(call)

        results = {}
        begin = time.monotonic()
        while waiting := [pipe for pipe in self.pipes if pipe not in results]:
            left = None if patience is None else max(0, begin + patience - time.monotonic())
            ready = multiprocessing.connection.wait(waiting, left)
            if not ready:
                self.fail(PoolError(f"no answer in {patience:g} s"))
            for pipe in ready:
                results[pipe] = self.receive(pipe)
        return [results[pipe] for pipe in self.pipes]

    def receive(self, pipe):
        """What one process sent. PoolError if it failed or died."""
        try:
            succeeded, result = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self.processes[self.pipes.index(pipe)]
            process.join(5)
            if process.exitcode == -signal.SIGKILL:  # the kernel does that when memory runs out
                self.fail(PoolError("killed (out of memory?)"))
            self.fail(PoolError(f"its process ended with status {process.exitcode}"))
        if not succeeded:
            self.fail(PoolError(*result))
        return result

    def fail(self, error: PoolError) -> None:
        """End the processes and raise the error."""
        self.stop()
        self.ended = str(error)
        raise error

    def stop(self) -> None:
        """End the processes."""
        self.ended = self.ended or "the pool was stopped"
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()


def serve(pipe, environment: dict[str, str], threads: int, start, args: tuple) -> None:
    """The life of one process of a pool: call what comes through the pipe, until it is closed."""
    program.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and so us
    os.environ |= environment
    torch.set_num_threads(threads)
    try:
        started = start(*args)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps((False, described(error))))
        os._exit(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(answer_of(function, started, *args))
    os._exit(0)  # gloo may abort while the interpreter shuts down


def answer_of(function, *args) -> bytes:
    """(True, the result) or (False, the arguments of a PoolError), pickled."""
    try:
        return pickle.dumps((True, function(*args)))
    except BaseException as error:
        return pickle.dumps((False, described(error)))


def described(error: BaseException) -> tuple[str, str]:
    """The arguments of a PoolError for this one."""
    details = "".join(traceback.format_exception(error))
    if any(out_of_memory(found) for found in (error, error.__cause__)):
        return "out of memory", details
    words = f"{type(error).__name__}: {error}"
    return textwrap.shorten(words, 200, placeholder=" ..."), details


# -------------------------------------------------------------------------------------------------
# The end


def run(main) -> None:
    """Call `main(argv)`, the program of this rank, then end the process with its exit status.

    It ends by os._exit, after a barrier: with gloo a rank may abort while the interpreter shuts
    down, which would change the status.
    """
    end_with_torchrun()
    program.escape_unprintable()
    threading.excepthook = end_with_thread

    def among_others(argv):
        try:
            main(argv)
            if dist.is_initialized():
                dist.barrier()
        finally:
            end_roll_call()
        if dist.is_initialized():
            dist.destroy_process_group()

    try:
        status = program.status_of(among_others, report_user_error)
    except BaseException as error:
        status = RESUME_ME if is_lost(error) else 1
        if is_lost(error):
            line = f"lost another rank: {program.one_line(error)}"
            program.print_error(line, f"error on rank {program.rank()}")
        else:
            traceback.print_exc()
    if status == 2:
        program.end_torchrun()  # a restart would only fail in the same way
    os._exit(program.flushed(status))


def end_with_thread(failure) -> None:
    """End this rank when one of its threads has failed, of whichever it is.

    Without its heartbeats or its copies a run would only seem to go on. The other ranks notice that
    this one is gone. A thread may end itself by sys.exit.
    """
    if failure.exc_type is SystemExit:
        return
    mistake = program.user_error(failure.exc_value)
    if mistake:
        program.print_error(mistake, f"error on rank {program.rank()}")
    else:
        traceback.print_exception(failure.exc_value)
    os._exit(program.flushed(getattr(mistake, "status", 2) if mistake else 1))


def report_user_error(error: BaseException) -> None:
    """Print the line of an error, once if all ranks share it.

    Other ranks wait 10 seconds before they print: if rank 0 fails as well, its line is enough, and
    torchrun ends the others in the meantime.
    """
    if program.rank() == 0:
        program.print_error(error)
    elif not getattr(error, "on_all_ranks", False):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what torchrun sends
        time.sleep(10)
        program.print_error(error, f"error on rank {program.rank()}")


def is_lost(error: BaseException) -> bool:
    """Did a collective fail because another rank has gone?"""
    if program.user_error(error):  # NCCL reports a lack of memory by the same class
        return False
    # gloo has no class of its own: its errors begin with the path of its source
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


# -------------------------------------------------------------------------------------------------
# Agreeing


def rank_zero_decides(decide):
    """`decide()` on rank 0, or in a process without others.

    Every rank gets its result, or its UserError.
    """
    if not dist.is_initialized():
        return decide()
    box = [None]
    if dist.get_rank() == 0:
        try:
            box = [decide()]
        except (UserError, OSError) as error:  # OSError: a full disk, a missing permission
            box = [UserError(str(error), on_all_ranks=True)]
    dist.broadcast_object_list(box, device=torch.device("cpu"))
    if isinstance(box[0], UserError):
        raise box[0]
    return box[0]


def each_node_does(action, world: World) -> None:
    """`action()` on one rank of each node, for as long as that takes. A collective.

    If it fails on one of them, every rank gets its UserError.
    """
    if world.global_size == 1:
        return action()
    group = new_group(timedelta(days=7))  # in which the others wait
    problem = None
    if world.local_rank == 0:
        try:
            action()
        except (UserError, OSError) as error:
            problem = error if isinstance(error, UserError) else UserError(str(error))
            problem.on_all_ranks = True
    problems = [None] * world.global_size
    dist.all_gather_object(problems, problem, group=group)
    for problem in filter(None, problems):
        raise problem


def all_max(numbers: list[float], world: World) -> list[float]:
    """The largest of each number over all ranks. A collective of the CPUs: no GPU waits."""
    largest = torch.tensor(numbers, dtype=torch.float64)
    if world.global_size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def dp_sum(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """The sum over the data-parallel ranks, in place."""
    if world.dp_size > 1:
        dist.all_reduce(tensor, group=world.dp_group)
    return tensor


def demonstrate(argv) -> None:
    """Print how long this rank took to meet the others."""
    program.arguments(argv)
    rank, size, _, _ = program.place()
    require(size > 1, "one process is alone: torchrun --nproc_per_node 2 processes.py")
    begin = time.monotonic()
    join("gloo", rank, size, timedelta(seconds=MEETING))
    print(f"{whoami(rank)} met all in {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    run(demonstrate)

"""The ranks of a run: who each one is, with whom it talks, what they agree on, and how it ends.

    World                the numbers of a rank, its device, and its groups of other ranks
    start                a rank learns who it is, picks its device and joins the others
    together             what fails on one rank fails on all; rank_zero_decides: rank 0 acts for all
    dp_sum, all_max      collectives
    run                  calls a program's main and ends the rank with an exit status

How several ranks find each other is in launch/rendezvous.py.
"""

import contextlib
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

import devices
import program
from launch import heartbeat
from launch.heartbeat import is_lost
from program import RESUME_ME, StartAgain, UserError, end_with_torchrun, require

TIMEOUT = timedelta(minutes=60)  # of one collective: a rank that waits longer fails
LONG = timedelta(days=7)  # the same, for a download


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
    rank, size, local_rank, local_size = program.read_launcher()
    join_freed_gpu_memory()
    device = pick_device(device_type, local_rank, local_size, size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # nccl is RCCL on ROCm
    if not dist.is_initialized():  # a benchmark calls this once for each of its rows
        if timeout:
            heartbeat.quiet_nccl(timeout)
        join(backend, timeout or TIMEOUT)
    if device.type == "cpu":
        devices.keep_freed_memory()
    world = World(rank, size, local_rank, local_size, device, timeout=timeout or TIMEOUT)
    return in_grid(world, tp, pp)


def join(backend: str, timeout: timedelta) -> None:
    """init_process_group for this rank. `timeout`: of one collective.

    If the ranks do not meet in time, this one ends with RESUME_ME and a line. Raises UserError if
    the address is missing or taken.
    """
    rank, size, _, _ = program.read_launcher()
    group = {"backend": backend, "rank": rank, "world_size": size, "timeout": timeout}
    if size > 1:
        from launch import rendezvous  # here, since one process alone does without

        rendezvous.join(group)
    else:
        dist.init_process_group(store=dist.HashStore(), **group)


def in_grid(world: World, tp: int, pp: int = 1) -> World:
    """The same world, whose ranks form a grid of pp stages x data-parallel ranks x tp tensor ranks.

    Launchers number the ranks of a node in a row. So tensor ranks, which talk most, are neighbours,
    and stages, which talk least, are far apart. A collective. UserError if the ranks do not fill
    the grid.
    """
    if tp * pp == 1:
        return world
    size = world.global_size
    require(
        size % (tp * pp) == 0,
        f"{size} ranks cannot form a grid of tp {tp} x pp {pp}: start a multiple of {tp * pp}, or "
        "change --tp and --pp",
    )
    grid = torch.arange(size).view(pp, -1, tp)
    pp_rank, dp_rank, tp_rank = (grid == world.global_rank).nonzero()[0].tolist()
    with heartbeat.within("connect the grid of ranks"):
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
    names a group after its ranks and the number of groups that this rank is in already. So that
    number must be the same on all ranks of a group.
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


def new_group(timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks, for a thread beside the main one. A collective, to which the ranks
    may come at different times."""
    if dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1))  # wait for all: a rank that is late after this is lost
    with heartbeat.within("connect a new group"):
        return dist.new_group(backend="gloo", timeout=timeout)


@contextlib.contextmanager
def acting_alone():
    """In here this rank does by itself what would else be a collective of all ranks.

    Only a group that is named still communicates: rank 0 of a server reads files, while the others
    wait for its next step.
    """
    everybody = dist.group.WORLD
    dist.group.WORLD = None
    try:
        yield
    finally:
        dist.group.WORLD = everybody


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
        with heartbeat.ending_with_others():
            main(argv)
            if dist.is_initialized():
                dist.barrier()
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
    os._exit(program.flush(status))


def run_alone_or_with_others(main) -> None:
    """`run` under torchrun, else `program.run`.

    Several tasks of srun are no ranks here: each of them serves by itself.
    """
    if "RANK" in os.environ:
        run(main)
    program.run(main)


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
    os._exit(program.flush(getattr(mistake, "status", 2) if mistake else 1))


def report_user_error(error: BaseException) -> None:
    """Print the line of an error, once if all ranks share it.

    The other ranks wait for rank 0, up to 10 seconds. torchrun ends all ranks as soon as one has
    ended, so rank 0 has to print its line before that; and if it fails as well, its line is enough.
    """
    if program.rank() == 0:
        program.print_error(error)
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what torchrun sends
    time.sleep(10)
    if not getattr(error, "on_all_ranks", False):
        program.print_error(error, f"error on rank {program.rank()}")


# -------------------------------------------------------------------------------------------------
# Agreeing


def together(action, on: str | int = "all", group: dist.ProcessGroup | None = None):
    """Call `action()` on "all" ranks, or on rank 0; if it fails on one, all raise its error.

    Returns the results of all ranks, or that of rank 0. A collective, which also works in a process
    without others. UserError and OSError (a full disk, a missing permission) are shared, as a
    UserError; any other exception is a bug, and ends its own rank. group: in which the ranks tell
    each other.
    """
    if not dist.is_initialized():
        return action() if on == 0 else [action()]
    result = error = None
    if on == "all" or dist.get_rank() == on:
        try:
            result = action()
        except (UserError, OSError) as failure:
            kind = StartAgain if isinstance(failure, StartAgain) else UserError
            error = kind(str(failure), on_all_ranks=True)
    found = [(result, error)] * (dist.get_world_size() if on == "all" else 1)
    if on == "all":
        dist.all_gather_object(found, found[0], group)
    else:
        dist.broadcast_object_list(found, src=on, group=group, device=torch.device("cpu"))
    for _, error in found:
        if error:
            raise error
    results = [result for result, _ in found]
    return results if on == "all" else results[0]


def rank_zero_decides(decide):
    """`decide()` on rank 0. Every rank gets its result, or its UserError: see `together`."""
    return together(decide, on=0)


def all_max(numbers: list[float], world: World) -> list[float]:
    """The largest of each number over all ranks. A collective of the CPUs: no GPU waits."""
    largest = torch.tensor(numbers, dtype=torch.float64)
    if world.global_size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def dp_sum(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """The sum over the data-parallel ranks, in place."""
    if world.dp_size > 1:
        dist.all_reduce(tensor, group=world.dp_group)
    return tensor

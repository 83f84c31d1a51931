"""The bytes of a real training step, counted on fake tensors: the oracle of planning/memory.py.

    count(MPTConfig(...), TrainConfig(...), ranks=8)["loss forward"]     {part: bytes}

`fsdp_train.train_step` runs on fake tensors, which have shapes but no data. Each operation of the
forward, the backward and the update is dispatched as usual, and `LiveBytes` sums the storages that
are alive. A fake process group stands in for the collectives of the other ranks. So MPT-1B on 8
ranks can be counted on a laptop, without a GPU.

Two counts that are not ours stand beside it: torch's MemTracker (`tracked`), and the CPU's
allocator under real tensors (`allocated`).
"""

import collections
import contextlib
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_train
import loss
import optim
import parallel
import pipeline
import processes
import tensor_parallel
from config import MPTConfig, TrainConfig
from model import MPT
from tracing.tracer import Tracer, tensors_in

# Parts of a step's memory, named as in planning/memory.py.
FROZEN = "frozen weights"
WEIGHTS = "weights, fp32"
GRADIENTS = "gradients, fp32"
MOMENTS = "Adam's moments, fp32"
COPIES = "copies of the weights"
BLOCKS = "blocks' activations"
LOSS = "final norm and loss"
WORKSPACE = "backward's workspace"

# --- Counting the storages that are alive


@dataclass
class Buffer:
    """A storage that is alive, and the part of the step's memory that it belongs to."""

    bytes: int
    part: str


def storage_of(tensor) -> torch.UntypedStorage:
    """The storage of a tensor; of a DTensor, the storage of this rank's shard."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


class LiveBytes(Tracer):
    """A tracer that sums the bytes of all storages that are alive, and lists no operations.

    A storage counts from the operation that returns the first tensor in it until it is freed.

    phase: the part of the step that runs now; in the backward, the autograd node tells it.
    peaks: {moment: (bytes, [(Buffer, its bytes at that time)])}. A Buffer's part may be corrected
        later, when it is clear what it holds.
    """

    def __init__(self):
        super().__init__()
        self.buffers = weakref.WeakKeyDictionary()  # storage -> Buffer
        self.total = 0
        self.phase = ""
        self.peaks = {}

    def __enter__(self):
        self.original_resize = torch.UntypedStorage.resize_

        def resize(storage, size):  # FSDP frees and refills its buffers by resizing them
            self.original_resize(storage, size)
            self.update(storage)

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.original_resize
        return super().__exit__(*error)

    def note(self, operation, args, kwargs, result) -> None:
        """Note the storages of an operation's result."""
        moment, part = self.moment_and_part()

        is_cast = operation is torch.ops.aten._to_copy.default
        if is_cast and self.part_of(args[0]) in (WEIGHTS, FROZEN):
            part = COPIES
        if "allgather" in str(operation) and args[0].dim() == 1:  # else of tokens
            self.assign(tensors_in(args), COPIES)

        for tensor in tensors_in(result):
            self.update(storage_of(tensor), part)
        highest, _ = self.peaks.get(moment, (0, None))
        if self.total > highest:
            sizes = [(buffer, buffer.bytes) for buffer in self.buffers.values()]
            self.peaks[moment] = (self.total, sizes)

    def update(self, storage, part: str = WORKSPACE) -> None:
        """Bring the total up to date with a storage's size. part: of a storage that is new."""
        buffer = self.buffers.get(storage)
        if buffer is None:
            buffer = Buffer(0, part)
            self.buffers[storage] = buffer
            weakref.finalize(storage, self.free, buffer).atexit = False
        self.total += storage.nbytes() - buffer.bytes
        buffer.bytes = storage.nbytes()

    def free(self, buffer: Buffer) -> None:
        """Subtract a storage that no longer exists."""
        self.total -= buffer.bytes

    def part_of(self, tensor) -> str | None:
        """The part that a tensor's storage belongs to; None if it has not been seen."""
        buffer = self.buffers.get(storage_of(tensor))
        return buffer and buffer.part

    def assign(self, tensors, part: str) -> None:
        """Say which part the tensors' storages belong to."""
        for tensor in tensors:
            storage = storage_of(tensor)
            self.update(storage)
            self.buffers[storage].part = part

    def moment_and_part(self) -> tuple[str, str]:
        """The moment, as planning/memory.py names it, and the part of a storage made now."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self.phase, BLOCKS if self.phase == "forward" else LOSS
        self.phase = "after backward"  # until the next forward
        if "LinearCrossEntropy" in node.name():
            return "loss backward", LOSS
        if "Embedding" in node.name():
            self.phase = "embedding backward"  # also for what FSDP does after the backward
        is_last = self.phase == "embedding backward"
        return "embedding backward" if is_last else "block backward", WORKSPACE

    def follow_step(self, model: MPT, optimizer) -> None:
        """Add hooks that tell the phase of the step, and which tensors belong to which part."""

        def begin_microbatch(module, inputs, keywords):
            # So that only the last microbatch is left; in a pipeline, only the last step.
            if not isinstance(model, pipeline.Stage) or self.phase in ("", "update"):
                self.peaks.clear()
            self.phase = "forward"
            for buffer in self.buffers.values():
                if buffer.part in (WORKSPACE, LOSS):  # it has outlived a backward
                    buffer.part = GRADIENTS
            self.assign(tensors_in(keywords), BLOCKS)  # hidden states of the stage before

        def find_gathered_weights(block, inputs):
            own = WEIGHTS, FROZEN
            gathered = [p for p in block.parameters() if self.part_of(p) not in own]
            self.assign(gathered, COPIES)

        def begin_loss(norm_f, inputs):
            if isinstance(norm_f, torch.nn.Identity):  # another stage has the loss
                return
            self.assign(inputs, LOSS)
            self.phase = "loss forward"

        def begin_update(optimizer, *arguments):
            self.assign(tensors_in([p.grad for p in model.parameters()]), GRADIENTS)
            self.phase = "update"

        for param in model.parameters():
            self.assign([param], WEIGHTS if param.requires_grad else FROZEN)
        model.register_forward_pre_hook(begin_microbatch, with_kwargs=True)
        for module in (*model.transformer.blocks, model.transformer):
            module.register_forward_pre_hook(find_gathered_weights)
        model.transformer.norm_f.register_forward_pre_hook(begin_loss)
        optimizer.register_step_pre_hook(begin_update)


# --- Steps on fake tensors


def two_steps(
    m: MPTConfig,
    cfg: TrainConfig,
    ranks: int,
    precision: str,
    observer: contextlib.AbstractContextManager,
    prepare: Callable = lambda model, optimizer: None,
    after_step: Callable = lambda optimizer: None,
    stage: int = 0,
) -> None:
    """Two training steps on fake tensors, as the last tensor rank of the first team of a stage.

    ranks: data-parallel ranks x cfg.tp x cfg.pp. The last tensor rank has the largest parts.
    observer: a context in which the steps run. prepare(model, optimizer) is called before them,
    after_step(optimizer) after each.
    """
    rank = stage * ranks // cfg.pp + cfg.tp - 1
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        world = processes.World(rank, ranks, rank, ranks, torch.device("cpu"))
        world = processes.in_grid(world, cfg.tp, cfg.pp)
        mesh = parallel.make_mesh(world, cfg)
        with FakeTensorMode(), loss_of(cfg.device), real_offsets(), rms_norm_of_a_gpu():
            model = MPT(m)
            if team := tensor_parallel.team_of(world, cfg.sequence_parallel):
                tensor_parallel.cut(model, team)
            if pipe := pipeline.pipe_of(world):
                pipeline.keep_stage(model, pipe)
            model, optimizer = prepared(model, mesh, cfg, precision)
            prepare(model, optimizer)
            n_rows = cfg.global_batch_size // world.dp_size
            rows = torch.zeros(n_rows, m.max_seq_len + 1, dtype=torch.int64)
            with observer:
                for step in range(2):
                    fsdp_train.train_step(model, optimizer, rows, step, cfg, world, precision)
                    after_step(optimizer)
    finally:
        dist.destroy_process_group()


def prepared(model: MPT, mesh, cfg: TrainConfig, precision: str):
    """(model, optimizer): with adapters, recomputed and sharded, as parallel.build makes them."""
    parallel.put_adapters_on(model, cfg, precision)
    model = parallel.parallelize(model, mesh, cfg, precision)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return model, optim.build_optimizer(named, cfg)


@contextlib.contextmanager
def loss_of(device: str) -> Iterator[None]:
    """A context in which fake tensors, which are on the CPU, take the loss of this device."""
    on_gpu = device not in ("cpu", "mps")
    assert importlib.util.find_spec("triton") or not on_gpu, "the loss of a GPU needs triton"
    loss_rows = loss.loss_rows

    def rows_there(vocab_size, _):
        return loss_rows(vocab_size, torch.device("cuda" if on_gpu else "cpu"))

    with contextlib.ExitStack() as patches:
        for file in (loss, tensor_parallel):
            patches.enter_context(mock.patch.object(file, "loss_rows", rows_there))
        patches.enter_context(mock.patch.object(loss, "takes_kernel", lambda *_: on_gpu))
        yield


def real_offsets():
    """A context in which DTensors compute where their shards begin in tensors that have data."""
    chunk_list = DTensor.__create_chunk_list__

    def on_real_tensors(tensor):
        with unset_fake_temporarily():
            return chunk_list(tensor)

    return mock.patch.object(DTensor, "__create_chunk_list__", on_real_tensors)


class FusedRMSNorm(torch.autograd.Function):
    """The shapes of a GPU's RMSNorm: it keeps its input and 1/rms of each row.

    On a CPU PyTorch has it made of small operations, each of which keeps tensors of its own.
    """

    @staticmethod
    def forward(ctx, x, weight):
        """x: (..., D)."""
        inverse = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        """The gradients of x and weight."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def rms_norm_of_a_gpu():
    """A context in which fake tensors, which are on the CPU, take the RMSNorm of a GPU."""

    def rms_norm(x, shape, weight=None, eps=None):
        return FusedRMSNorm.apply(x, weight)

    return mock.patch.object(torch.nn.functional, "rms_norm", rms_norm)


# --- Three counts


def count(
    m: MPTConfig, cfg: TrainConfig, ranks: int = 1, precision: str = "bf16", stage: int = 0
) -> dict[str, dict[str, int]]:
    """{moment: {part: bytes}} of one rank of a stage, at the peak of each moment.

    Of the last microbatch of the second step: by then Adam's moments exist. In a pipeline, of all
    microbatches of that step.
    """
    live = LiveBytes()

    def after_step(optimizer):
        tensors = tensors_in([list(state.values()) for state in optimizer.state.values()])
        live.assign((tensor for tensor in tensors if tensor.dim()), MOMENTS)  # not the step count

    two_steps(m, cfg, ranks, precision, live, live.follow_step, after_step, stage)
    return {moment: by_part(sizes) for moment, (_, sizes) in live.peaks.items()}


def by_part(sizes: list[tuple[Buffer, int]]) -> dict[str, int]:
    """Bytes of the buffers, by the part that they belong to."""
    sums = collections.Counter()
    for buffer, size in sizes:
        sums[buffer.part] += size
    return dict(sums)


def tracked(m: MPTConfig, cfg: TrainConfig, ranks: int = 1, precision: str = "bf16") -> int:
    """The peak of rank 0, in bytes, as torch's own MemTracker counts it: one microbatch a step.

    The steps run once before, without the tracker, to fill DTensor's cache of shapes: filling it
    makes fake tensors of whole weights, which a real step does not allocate.
    """
    two_steps(m, cfg, ranks, precision, contextlib.nullcontext())
    tracker = MemTracker()

    def after_step(optimizer):
        tracker.reset_mod_stats()

    two_steps(m, cfg, ranks, precision, tracker, tracker.track_external, after_step)
    peaks = tracker.get_tracker_snapshot("peak")
    return sum(parts["Total"] for parts in peaks.values())


def allocated(m: MPTConfig, cfg: TrainConfig) -> int:
    """The peak in bytes of a second step on real tensors, on one rank.

    As torch's profiler saw the CPU's allocator. The model and the optimizer's state, which exist
    before the step, are among them.
    """
    world = processes.World(0, 1, 0, 1, torch.device("cpu"))
    model, optimizer = prepared(MPT(m), None, cfg, "bf16")
    rows = torch.zeros(cfg.global_batch_size, m.max_seq_len + 1, dtype=torch.int64)
    fsdp_train.train_step(model, optimizer, rows, 0, cfg, world, "bf16")

    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as record:
        fsdp_train.train_step(model, optimizer, rows, 1, cfg, world, "bf16")
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    state = tensors_in([list(moments.values()) for moments in optimizer.state.values()])
    current = sum(tensor.nbytes for tensor in (*model.parameters(), *state))
    peak = current
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak

"""The memory of real training steps, counted on fake tensors, beside planning/memory.py's estimate.

    python -m bench memory [OUT.md]        estimates beside counts, to bench/results/memory.md

`fsdp_train.train_step` runs on fake tensors, which have shapes but no data. Each operation of the
forward, the backward and the update is dispatched as usual, and `LiveBytes` below sums the storages
that are alive. A fake process group stands in for the collectives of 8 ranks. So MPT-1B can be
counted on a laptop, without a GPU.
"""

import collections
import contextlib
import dataclasses
import itertools
import platform
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
import config
import fsdp_train
import lora
import loss
import optim
import parallel
import pipeline
import processes
import tensor_parallel
from config import SHARDING_MODES, MPTConfig, TrainConfig
from model import MPT
from planning import memory

ROOT = Path(__file__).resolve().parent.parent

# Parts of a step's memory, named as in planning/memory.py.
FROZEN = "frozen weights"
WEIGHTS = "weights, fp32"
GRADIENTS = "gradients, fp32"
MOMENTS = "Adam's moments, fp32"
COPIES = "copies of the weights"
BLOCKS = "blocks' activations"
LOSS = "final norm and loss"
WORKSPACE = "backward's workspace"
VARYING = (COPIES, BLOCKS, LOSS, WORKSPACE)  # the parts that depend on the batch or the moment
CHECKPOINTING = ("none", "selective", "full")

DOCUMENT = """# Memory of a training step: estimated and counted

`python -m bench memory`, {date}, Python {python}, torch {torch}, {seconds} s on two CPU cores.

- **estimate**: the closed form of `planning/memory.py`.
- **counted**: `fsdp_train.train_step` on fake tensors: forward, backward and fused AdamW under bf16
  autocast, with the CPU's flash attention (`attn_impl="sdpa"`) and a GPU's loss, whose kernel works
  in place. The sum of all storages that are alive, after every operation of the last microbatch of
  a second step. With 8 ranks: rank 0 of a fake process group, with the real `fully_shard`.
- **allocated**: the same step on real tensors, with the CPU's loss, as torch's profiler saw the
  CPU's allocator.

Sequences of 2,048 tokens, bf16, GB = 10^9 bytes. Not run on a GPU. There, more memory goes to the
allocator's gaps, the workspaces of the matmuls, the buffers of NCCL or RCCL and the driver, and
FSDP's collectives run beside the computation.

## One rank, two microbatches a step

Weights, gradients and Adam's moments take 16 bytes a parameter, estimated and counted: 2.005 GB for
MPT-125M, 21.055 GB for MPT-1B. The columns of the other parts say "estimate, counted", at the peak.

{several}

## One rank, one microbatch a step

The gradients of this step do not exist yet when the loss is computed.

{one}

## MPT-1B on 8 ranks, microbatch 4, two microbatches a step

HYBRID_SHARD: two copies of the model, each sharded over 4 ranks.

{sharded}

## MPT-1B over tensor ranks, microbatch 4, two microbatches a step

`tensor_parallel.py` cuts every layer over the tensor ranks; with several data-parallel ranks,
FULL_SHARD shards each part over those. Counted on the last tensor rank.

{cut}

## MPT-1B on the stages of a pipeline, microbatch 2, eight microbatches a step

`pipeline.py` gives each of four stages six of the 24 layers, and the ends the tied embedding.
Counted over all microbatches of a step; sends and receives are those of a fake process group.
The third stage has what the second has, and fewer microbatches in flight.

{staged}

## MPT-1B with adapters (LoRA), microbatch 4, two microbatches a step

The frozen weights are bf16 and have neither gradients nor moments. Rank 8, on all linear layers
unless the row says otherwise.

{adapted}

## Is the count right?

`torch.distributed._tools.mem_tracker.MemTracker` is torch's own count of a step on fake tensors. It
supports one microbatch a step. MPT-1B, microbatch 4, on 1 rank and on 8, in GB:

{tracker}

Two small models whose peaks are at different moments, in MB. A: 4 layers of 256, vocabulary 8,192,
2 x 512 tokens. B: 2 layers of 256, vocabulary 16,384, 2 x 16 tokens.

{real}

For B the count is above the allocator's figure by the size of one embedding. Autograd adds the two
gradients of a tied embedding in place, but into a third buffer if the tensors are fake. The
estimate has two buffers. MPT-1B's rows with one microbatch that differ do so for the same reason.

## Reading

- The peak is usually in the forward of the loss, when everything that the blocks keep is alive. One
  chunk of 4,096 rows of logits at a time comes on top: 2 bytes a logit, 0.41 GB however many tokens
  there are. (On a CPU 6 bytes a logit, of 256 rows: 0.08 GB.)
- With one microbatch a step and full checkpointing, the peak is at the end of the backward, when
  the gradients exist.
- A block keeps 32 bytes per token and d_model, 22 with selective checkpointing, 2 with full.
- On one rank the graph keeps bf16 copies of the weights of every block that is not recomputed: 2
  bytes a parameter. With several microbatches they are made once, and stay until the last one.
- Tensor parallelism divides the weights and half of what a block keeps, but not the residual stream
  and the inputs of linear layers. Sequence parallelism divides the residual stream, too. Its linear
  layers keep the tokens that they have gathered, so without activation checkpointing it saves less
  than it could.
- The loss over tensor ranks has no kernel: 6 bytes a logit in bf16.
- A pipeline divides the state, but the first of p stages keeps the activations of p microbatches:
  as many bytes as one rank that has all layers. Recomputation makes them small.
- ZERO1 keeps whole fp32 gradients and gathered weights while it accumulates. Unlike DDP it
  shards the fp32 weights and Adam's moments, 12 bytes a parameter.
"""

# --- Counting the storages that are alive


@dataclasses.dataclass
class Buffer:
    """A storage that is alive, and the part of the step's memory that it belongs to."""

    bytes: int
    part: str


def storage_of(tensor) -> torch.UntypedStorage:
    """The storage of a tensor; of a DTensor, the storage of this rank's shard."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def tensors_in(tree) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


class LiveBytes(TorchDispatchMode):
    """Sums the bytes of all storages that are alive, by part of the step's memory.

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

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
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
        return result

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


def follow_step(live: LiveBytes, model: MPT, optimizer) -> None:
    """Add hooks that tell `live` the phase of the step, and which tensors belong to which part."""

    def begin_microbatch(module, inputs, keywords):
        # So that only the last microbatch is left; in a pipeline, only the last step.
        if not isinstance(model, pipeline.Stage) or live.phase in ("", "update"):
            live.peaks.clear()
        live.phase = "forward"
        for buffer in live.buffers.values():
            if buffer.part in (WORKSPACE, LOSS):  # it has outlived a backward
                buffer.part = GRADIENTS
        live.assign(tensors_in(keywords), BLOCKS)  # hidden states of the stage before

    def find_gathered_weights(block, inputs):
        own = WEIGHTS, FROZEN
        gathered = [p for p in block.parameters() if live.part_of(p) not in own]
        live.assign(gathered, COPIES)

    def begin_loss(norm_f, inputs):
        if isinstance(norm_f, torch.nn.Identity):  # another stage has the loss
            return
        live.assign(inputs, LOSS)
        live.phase = "loss forward"

    def begin_update(optimizer, *arguments):
        live.assign(tensors_in([p.grad for p in model.parameters()]), GRADIENTS)
        live.phase = "update"

    for param in model.parameters():
        live.assign([param], WEIGHTS if param.requires_grad else FROZEN)
    model.register_forward_pre_hook(begin_microbatch, with_kwargs=True)
    for module in (*model.transformer.blocks, model.transformer):
        module.register_forward_pre_hook(find_gathered_weights)
    model.transformer.norm_f.register_forward_pre_hook(begin_loss)
    optimizer.register_step_pre_hook(begin_update)


# --- Steps to count


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
        with FakeTensorMode(), loss_of(cfg.device), real_offsets():
            model = MPT(m)
            if team := tensor_parallel.team_of(world, cfg.sequence_parallel):
                tensor_parallel.cut(model, team)
            if pipe := pipeline.pipe_of(world):
                pipeline.keep_stage(model, pipe)
            if cfg.lora_rank:
                add_adapters(model, cfg, precision)
            model = parallel.parallelize(model, mesh, cfg, precision)
            optimizer = optim.build_optimizer(trained(model), cfg)
            prepare(model, optimizer)
            n_rows = cfg.global_batch_size // world.dp_size
            rows = torch.zeros(n_rows, m.max_seq_len + 1, dtype=torch.int64)
            with observer:
                for step in range(2):
                    fsdp_train.train_step(model, optimizer, rows, step, cfg, world, precision)
                    after_step(optimizer)
    finally:
        dist.destroy_process_group()


def add_adapters(model: MPT, cfg: TrainConfig, precision: str) -> None:
    """Make the model that of a run with adapters, as parallel.build does."""
    lora.put_on(model, cfg)
    if precision == "bf16":
        lora.store_frozen_in_bf16(model)


def trained(model: MPT) -> list[torch.nn.Parameter]:
    """The parameters that the optimizer updates."""
    return [param for param in model.parameters() if param.requires_grad]


@contextlib.contextmanager
def loss_of(device: str) -> Iterator[None]:
    """A context in which fake tensors, which are on the CPU, take the loss of this device."""
    on_gpu = device not in ("cpu", "mps")
    if on_gpu:
        hint = "pip install 'triton>=3.4', or set --device=cpu"
        config.require(attention.HAS_TRITON, f"the loss of a GPU needs triton: {hint}")
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


def count(
    m: MPTConfig, cfg: TrainConfig, ranks: int = 1, precision: str = "bf16", stage: int = 0
) -> dict[str, dict[str, int]]:
    """{moment: {part: bytes}} of one rank of a stage, at the peak of each moment.

    Of the last microbatch of the second step: by then Adam's moments exist. In a pipeline, of all
    microbatches of that step.
    """
    live = LiveBytes()

    def prepare(model, optimizer):
        follow_step(live, model, optimizer)

    def after_step(optimizer):
        tensors = tensors_in([list(state.values()) for state in optimizer.state.values()])
        live.assign((tensor for tensor in tensors if tensor.dim()), MOMENTS)  # not the step count

    two_steps(m, cfg, ranks, precision, live, prepare, after_step, stage)
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

    As torch's profiler saw the CPU's allocator.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        world = processes.World(0, 1, 0, 1, torch.device("cpu"))
        model = MPT(m)
        if cfg.lora_rank:
            add_adapters(model, cfg, "bf16")
        model = parallel.parallelize(model, None, cfg, "bf16")
        optimizer = optim.build_optimizer(trained(model), cfg)
        rows = torch.zeros(cfg.global_batch_size, m.max_seq_len + 1, dtype=torch.int64)
        fsdp_train.train_step(model, optimizer, rows, 0, cfg, world, "bf16")

        def step():
            fsdp_train.train_step(model, optimizer, rows, 1, cfg, world, "bf16")

        return peak_on_cpu(step, model, optimizer)
    finally:
        dist.destroy_process_group()


def peak_on_cpu(step: Callable, model, optimizer) -> int:
    """The most bytes that a training step has in memory, as torch's profiler sees the allocator.

    Those of the model and of the optimizer's state, which exist before, are among them.
    """
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as record:
        step()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    state = tensors_in([list(moments.values()) for moments in optimizer.state.values()])
    current = sum(tensor.nbytes for tensor in (*model.parameters(), *state))
    peak = current
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


# --- The document


def settings(
    batch: int, microbatches: int, checkpointing: str, ranks: int = 1, sharding: str = "FULL_SHARD"
) -> TrainConfig:
    """The training settings of a row. batch: sequences of a microbatch of one rank.

    ranks: data-parallel ranks.
    """
    return TrainConfig(
        microbatch_size=batch,
        global_batch_size=batch * microbatches * ranks,
        activation_checkpointing=checkpointing,
        sharding=sharding,
        shard_size=ranks // 2,
    )


def both_peaks(
    m: MPTConfig, cfg: TrainConfig, ranks: int = 1, stage: int = 0
) -> tuple[str, dict, dict]:
    """The moment of the estimated peak, and {part: bytes} of the peak, estimated and counted."""
    estimated = memory.bytes_by_moment(memory.Rank(m, cfg, ranks, stage=stage))
    counted = count(m, cfg, ranks, stage=stage)
    moment = max(estimated, key=lambda name: sum(estimated[name].values()))
    counted_peak = max(counted.values(), key=lambda parts: sum(parts.values()))
    return moment, estimated[moment], counted_peak


def peak_row(
    first_cells: list,
    m: MPTConfig,
    cfg: TrainConfig,
    ranks: int = 1,
    parts: tuple = (),
    stage: int = 0,
) -> str:
    """A row of the table of peaks: estimated, counted, their difference, and some parts of both."""
    moment, estimated, counted = both_peaks(m, cfg, ranks, stage)
    estimate = sum(estimated.values())
    counted_sum = sum(counted.values())
    cells = [*first_cells, cfg.activation_checkpointing]
    cells += [f"{estimate / 1e9:.3f}", f"{counted_sum / 1e9:.3f}"]
    cells += [f"{estimate / counted_sum - 1:+.2%}", moment]
    for part in parts:
        cells.append(f"{estimated[part] / 1e9:.2f}, {counted.get(part, 0) / 1e9:.2f}")
    return table_row(cells)


def tracker_row(m: MPTConfig, cfg: TrainConfig, ranks: int) -> str:
    """A row that also has the peak that torch's MemTracker finds."""
    moment, estimated, counted = both_peaks(m, cfg, ranks)
    estimate = sum(estimated.values())
    others = [sum(counted.values()), tracked(m, cfg, ranks)]
    cells = [ranks, cfg.sharding if ranks > 1 else "", cfg.activation_checkpointing, moment]
    cells += [f"{n / 1e9:.3f}" for n in (estimate, *others)]
    cells += [f"{estimate / n - 1:+.2%}" for n in others]
    return table_row(cells)


def real_row(name: str, m: MPTConfig, checkpointing: str) -> str:
    """A row that also has the peak of a real step, as the CPU's allocator saw it."""
    cfg = dataclasses.replace(settings(2, 1, checkpointing), device="cpu")
    moment, estimated, counted = both_peaks(m, cfg)
    peaks = [sum(estimated.values()), sum(counted.values()), allocated(m, cfg)]
    return table_row([name, checkpointing, moment, *(f"{peak / 1e6:.2f}" for peak in peaks)])


def table_row(cells: list) -> str:
    """A line of a Markdown table; also printed, to show progress."""
    print(*cells, flush=True)
    return f"| {' | '.join(map(str, cells))} |"


def table(head: str, rows: list[str]) -> str:
    """A Markdown table. head: the titles, with ", " between; rows: made by `table_row`."""
    titles = head.split(", ")
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows])


PEAK = "checkpointing, estimate, counted, difference, at"  # titles that several tables share


def one_rank_tables(models: dict[str, MPTConfig]) -> dict[str, str]:
    """Peaks on one rank, with several microbatches a step and with one."""
    cases = [
        (name, batch, checkpointing)
        for name in models
        for checkpointing in CHECKPOINTING
        for batch in (1, 4, 8)
    ]
    several = [
        peak_row([name, batch], models[name], settings(batch, 2, checkpointing), parts=VARYING)
        for name, batch, checkpointing in cases
    ]
    one = [
        peak_row([name, batch], models[name], settings(batch, 1, checkpointing))
        for name, batch, checkpointing in cases
    ]
    return {
        "several": table(f"model, microbatch, {PEAK}, {', '.join(VARYING)}", several),
        "one": table(f"model, microbatch, {PEAK}", one),
    }


def sharded_table(m: MPTConfig) -> str:
    """Peaks on 8 ranks, by sharding mode."""
    rows = [
        peak_row([mode], m, settings(4, 2, checkpointing, 8, mode), 8)
        for mode in SHARDING_MODES
        for checkpointing in CHECKPOINTING
    ]
    return table(f"mode, {PEAK}", rows)


def cut_table(m: MPTConfig) -> str:
    """Peaks on one of several tensor ranks."""
    rows = []
    for tp, dp in ((2, 1), (4, 1), (4, 2)):
        for checkpointing, sequence_parallel in itertools.product(CHECKPOINTING, (False, True)):
            cfg = dataclasses.replace(
                settings(4, 2, checkpointing, dp), tp=tp, sequence_parallel=sequence_parallel
            )
            first_cells = [tp, dp, "yes" if sequence_parallel else "no"]
            rows.append(peak_row(first_cells, m, cfg, tp * dp, parts=VARYING))
    head = f"tensor ranks, data-parallel ranks, sequence parallel, {PEAK}, {', '.join(VARYING)}"
    return table(head, rows)


def staged_table(m: MPTConfig) -> str:
    """Peaks on the first, the second and the last of four pipeline stages."""
    rows = []
    for dp, checkpointing in ((1, "none"), (1, "full"), (2, "none"), (2, "full")):
        cfg = dataclasses.replace(settings(2, 8, checkpointing, dp, "ZERO1"), pp=4)
        for stage in (0, 1, 3):
            rows.append(peak_row([stage, dp], m, cfg, 4 * dp, (BLOCKS, WORKSPACE), stage))
    return table(f"stage, data-parallel ranks (ZERO1), {PEAK}, {BLOCKS}, {WORKSPACE}", rows)


def adapted_table(m: MPTConfig) -> str:
    """Peaks of runs with adapters: on one rank, on sharded ones, on tensor ranks."""
    cases = {
        "1 rank": (1, {}),
        "1 rank, Wqkv only": (1, {"lora_targets": "Wqkv"}),
        "1 rank, the last 4 blocks": (1, {"lora_last_blocks": 4}),
        "8 ranks, FULL_SHARD": (8, {}),
        "2 tensor ranks": (1, {"tp": 2}),
    }
    rows = []
    for name, (dp, more) in cases.items():
        for checkpointing in ("none", "full"):
            cfg = settings(4, 2, checkpointing, dp)
            cfg = dataclasses.replace(cfg, init_from="base", lora_rank=8, **more)
            rows.append(peak_row([name], m, cfg, dp * cfg.tp, parts=(FROZEN, *VARYING)))
    return table(f"run, {PEAK}, {FROZEN}, {', '.join(VARYING)}", rows)


def tracker_table(m: MPTConfig) -> str:
    """Peaks on 1 rank and on 8, beside torch's MemTracker."""
    cases = [(1, "DDP"), *((8, mode) for mode in SHARDING_MODES)]
    rows = [
        tracker_row(m, settings(4, 1, checkpointing, ranks, mode), ranks)
        for ranks, mode in cases
        for checkpointing in ("none", "full")
    ]
    figures = "estimate, counted, MemTracker, to the count, to MemTracker"
    return table(f"ranks, mode, checkpointing, peak at, {figures}", rows)


def real_table() -> str:
    """Peaks of two small models, beside real steps."""
    a = MPTConfig(
        d_model=256, n_heads=4, n_layers=4, vocab_size=8192, max_seq_len=512, attn_impl="sdpa"
    )
    b = dataclasses.replace(a, n_layers=2, vocab_size=16384, max_seq_len=16)
    rows = [
        real_row(name, m, checkpointing)
        for name, m in {"A": a, "B": b}.items()
        for checkpointing in CHECKPOINTING
    ]
    return table("model, checkpointing, peak at, estimate, counted, allocated", rows)


def main(argv: list[str]) -> None:
    """Count all tables and write them to OUT.md."""
    (out,) = config.arguments(argv, "[OUT.md]") or [ROOT / "bench/results/memory.md"]
    begin = time.perf_counter()
    models = {}
    for name in ("mpt125m", "mpt1b"):
        (m,) = config.load([str(ROOT / f"configs/{name}.py")], MPTConfig)
        models[name] = dataclasses.replace(m, attn_impl="sdpa")

    tables = one_rank_tables(models)
    tables["sharded"] = sharded_table(models["mpt1b"])
    tables["cut"] = cut_table(models["mpt1b"])
    tables["staged"] = staged_table(models["mpt1b"])
    tables["adapted"] = adapted_table(models["mpt1b"])
    tables["tracker"] = tracker_table(models["mpt1b"])
    tables["real"] = real_table()
    text = DOCUMENT.format(
        date=time.strftime("%Y-%m-%d"),
        python=platform.python_version(),
        torch=torch.__version__,
        seconds=round(time.perf_counter() - begin),
        **tables,
    )
    Path(out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    config.run(main)

"""The bytes of real training steps, counted without the memory, beside planning/memory.py.

    python -m bench memory [OUT.md]        estimates beside counts, to bench/results/memory.md

`fsdp_train.train_step` runs on fake tensors: each operation is dispatched as ever, in the forward,
the backward and the update, but a tensor is a shape without numbers. `Live`, below, sums the
storages that are alive. The collectives of 8 ranks are those of a fake process group. So MPT-1B
needs no memory, and no GPU. Read next: bench/planner.py.
"""

import collections
import contextlib
import dataclasses
import platform
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import config
import fsdp_train
import optim
import parallel
import processes
from config import SHARDING_MODES, MPTConfig, TrainConfig
from model import MPT
from planning import memory

ROOT = Path(__file__).resolve().parent.parent

WEIGHTS, GRADIENTS, MOMENTS = "weights, fp32", "gradients, fp32", "Adam's moments, fp32"
COPIES, BLOCKS, LOSS = "copies of the weights", "blocks' activations", "final norm and loss"
WORKSPACE = "backward's workspace"
VARYING = (COPIES, BLOCKS, LOSS, WORKSPACE)
HOW = ("none", "selective", "full")

DOCUMENT = """# Memory of a training step: estimated and counted

`python -m bench memory`, {date}, Python {python}, torch {torch}, {seconds} s on two CPU cores.

- **estimate**: the closed form of `planning/memory.py`.
- **counted**: `fsdp_train.train_step` on fake tensors: forward, backward and fused AdamW under bf16 autocast, with the
  CPU's flash attention (`attn_impl="sdpa"`). All storages that are alive, after every operation of the last microbatch
  of a second step. Of 8 ranks: rank 0 of a fake process group, with the real `fully_shard`.
- **allocated**: the same step on real tensors, as torch's profiler saw the CPU's allocator.

Sequence 2,048, bf16, GB = 10^9 bytes. Not run on a GPU: there the allocator's gaps, the workspaces of the matmuls, the
buffers of NCCL or RCCL and the driver come on top, and FSDP's collectives run beside the computation.

## One rank, two microbatches a step

Weights, gradients and Adam's moments are 16 bytes a parameter, estimated and counted: 2.005 GB for MPT-125M, 21.055 GB
for MPT-1B. The other parts stand as "estimate, counted", at the peak.

{several}

## One rank, one microbatch a step

The gradients are new, so they are not there yet when the loss is computed.

{one}

## MPT-1B on 8 ranks, microbatch 4, two microbatches a step

HYBRID_SHARD: two copies of 4 ranks.

{sharded}

## Is the count right?

`torch.distributed._tools.mem_tracker.MemTracker` is torch's own count of a step on fake tensors. It follows one
microbatch a step: MPT-1B, microbatch 4, 1 rank and 8, in GB.

{tracker}

Two small models whose peaks are at different moments, in MB. A: 4 layers of 256, vocabulary 8,192, 2 x 512 tokens. B: 2
layers of 256, vocabulary 16,384, 2 x 16 tokens.

{real}

In B the count is above the allocator by one embedding: autograd adds the two gradients of a tied embedding in place,
but into a third buffer when the tensors are fake. The estimate has two. This is the difference in the last rows of
MPT-1B with one microbatch, too.

## Reading

- The peak is mostly in the forward of the loss, where all that the blocks keep is alive. One chunk of logits after
  another stands beside it: 10 bytes a logit, 0.64 GB however many tokens there are.
- With one microbatch a step and full checkpointing it is at the end of the backward, when the gradients are there.
- A block keeps 32 bytes per token and d_model, 22 with selective checkpointing, 2 with full.
- One rank has 2 bytes a parameter of bf16 copies in the graph of every block that is not recomputed.
- ZERO1 keeps whole fp32 gradients and gathered weights while it accumulates: against DDP it saves the fp32 weights and
  Adam's moments, 12 bytes a parameter.
"""


@dataclasses.dataclass
class Buffer:
    """A storage that is alive."""

    bytes: int
    part: str


def storage_of(tensor):
    """Where a tensor's numbers are, of a sharded one this rank's."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


class Live(TorchDispatchMode):
    """Sums the storages that operations make, from the first tensor in them to their end, by part of the step.

    `peaks`: {moment: (bytes, [(Buffer, its bytes then)])}; a Buffer's part may be corrected later.
    """

    def __init__(self):
        super().__init__()
        self.buffers = weakref.WeakKeyDictionary()  # storage -> Buffer
        self.now, self.peaks = 0, {}
        self.place = ""  # in the forward; in the backward the autograd node tells

    def __enter__(self):
        self.original = torch.UntypedStorage.resize_

        def resize(storage, size):  # FSDP frees and refills its buffers in this way
            self.original(storage, size)
            self.note(storage)

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.original
        return super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        moment, part = self.here()
        if operation is torch.ops.aten._to_copy.default and self.part_of(args[0]) == WEIGHTS:
            part = COPIES
        if "allgather" in str(operation):
            self.tag([leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)], COPIES)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.note(storage_of(leaf), part)
        if self.now > self.peaks.get(moment, (0,))[0]:
            self.peaks[moment] = (
                self.now,
                [(buffer, buffer.bytes) for buffer in self.buffers.values()],
            )
        return result

    def note(self, storage, part=WORKSPACE) -> None:
        buffer = self.buffers.get(storage)
        if buffer is None:
            buffer = self.buffers[storage] = Buffer(0, part)
            weakref.finalize(storage, self.freed, buffer).atexit = False
        self.now += storage.nbytes() - buffer.bytes
        buffer.bytes = storage.nbytes()

    def freed(self, buffer) -> None:
        self.now -= buffer.bytes

    def part_of(self, tensor) -> str | None:
        buffer = self.buffers.get(storage_of(tensor))
        return buffer and buffer.part

    def tag(self, tensors, part) -> None:
        """Say what the tensors are."""
        for storage in map(storage_of, tensors):
            self.note(storage)
            self.buffers[storage].part = part

    def here(self) -> tuple[str, str]:
        """The moment, named as in planning/memory.py, and the part that a storage belongs to if it is made now."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self.place, BLOCKS if self.place == "forward" else LOSS
        if "LinearCrossEntropy" in node.name():
            return "loss backward", LOSS
        if "Embedding" in node.name():
            self.place = "embedding backward"  # and what FSDP does when the backward is over
        return (
            "embedding backward" if self.place == "embedding backward" else "block backward",
            WORKSPACE,
        )


def watch(live: Live, model: MPT, optimizer) -> None:
    """Tell `live` where the step is, and what weights, gradients and moments are."""

    def begin(module, inputs):
        live.place = "forward"
        live.peaks.clear()  # the last microbatch remains
        for buffer in live.buffers.values():
            if buffer.part == WORKSPACE:  # and outlived a backward
                buffer.part = GRADIENTS

    def gathered(block, inputs):
        live.tag([p for p in block.parameters() if live.part_of(p) != WEIGHTS], COPIES)

    def end_of_blocks(norm_f, inputs):
        live.tag(inputs, LOSS)
        live.place = "loss forward"

    def update(optimizer, *arguments):
        live.tag([p.grad for p in model.parameters()], GRADIENTS)
        live.place = "update"

    live.tag(model.parameters(), WEIGHTS)
    model.register_forward_pre_hook(begin)
    for module in (*model.transformer.blocks, model.transformer):
        module.register_forward_pre_hook(gathered)
    model.transformer.norm_f.register_forward_pre_hook(end_of_blocks)
    optimizer.register_step_pre_hook(update)


def two_steps(
    m: MPTConfig, cfg: TrainConfig, ranks: int, precision: str, mode, made, stepped
) -> None:
    """As rank 0 of `ranks`, on fake tensors. `mode` sees the steps; made(model, optimizer) comes before them, and after
    each stepped(optimizer)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        world = processes.World(0, ranks, 0, ranks, torch.device("cpu"))
        mesh = parallel.make_mesh(world, cfg)
        with FakeTensorMode():
            model = parallel.parallelize(MPT(m), mesh, cfg, precision)
            optimizer = optim.build_optimizer(model.parameters(), cfg)
            made(model, optimizer)
            rows = torch.zeros(cfg.global_batch_size // ranks, m.max_seq_len + 1, dtype=torch.int64)
            with mode:
                for step in range(2):
                    fsdp_train.train_step(model, optimizer, rows, step, cfg, world, precision)
                    stepped(optimizer)
    finally:
        dist.destroy_process_group()


def count(
    m: MPTConfig, cfg: TrainConfig, ranks: int = 1, precision: str = "bf16"
) -> dict[str, dict[str, int]]:
    """{moment: {part: bytes}} of rank 0 in the last microbatch of the second step, at the peak of each moment."""
    live = Live()

    def stepped(optimizer):
        live.tag(
            [t for state in optimizer.state.values() for t in state.values() if t.dim()], MOMENTS
        )

    two_steps(
        m,
        cfg,
        ranks,
        precision,
        live,
        lambda model, optimizer: watch(live, model, optimizer),
        stepped,
    )
    return {moment: by_part(buffers) for moment, (_, buffers) in live.peaks.items()}


def tracked(m: MPTConfig, cfg: TrainConfig, ranks: int = 1, precision: str = "bf16") -> int:
    """The peak of rank 0 as torch's own MemTracker sees it, in bytes. It follows one microbatch a step, not several.

    A run before it fills DTensor's cache of shapes: for that, fake tensors of whole weights are made, which are no
    memory.
    """
    two_steps(m, cfg, ranks, precision, contextlib.nullcontext(), lambda *_: None, lambda _: None)
    tracker = MemTracker()
    two_steps(
        m,
        cfg,
        ranks,
        precision,
        tracker,
        tracker.track_external,
        lambda _: tracker.reset_mod_stats(),
    )
    return sum(parts["Total"] for parts in tracker.get_tracker_snapshot("peak").values())


def by_part(buffers) -> dict[str, int]:
    """Bytes of the buffers, by the part that they belong to."""
    sums = collections.Counter()
    for buffer, n in buffers:
        sums[buffer.part] += n
    return dict(sums)


def allocated(m: MPTConfig, cfg: TrainConfig) -> int:
    """The peak of a second step on real tensors, one rank, as torch's profiler saw the CPU's allocator: bytes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        world = processes.World(0, 1, 0, 1, torch.device("cpu"))
        model = parallel.parallelize(MPT(m), None, cfg, "bf16")
        optimizer = optim.build_optimizer(model.parameters(), cfg)
        rows = torch.zeros(cfg.global_batch_size, m.max_seq_len + 1, dtype=torch.int64)
        fsdp_train.train_step(model, optimizer, rows, 0, cfg, world, "bf16")
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as record:
            fsdp_train.train_step(model, optimizer, rows, 1, cfg, world, "bf16")
    finally:
        dist.destroy_process_group()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 12 * sum(
        p.numel() for p in model.parameters()
    )  # weights and moments were there before
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def settings(
    batch: int, microbatches: int, how: str, ranks: int = 1, sharding: str = "FULL_SHARD"
) -> TrainConfig:
    """The training settings of one row."""
    return TrainConfig(
        microbatch_size=batch,
        global_batch_size=batch * microbatches * ranks,
        activation_checkpointing=how,
        sharding=sharding,
        shard_size=ranks // 2,
    )


def both_peaks(m: MPTConfig, cfg: TrainConfig, ranks: int = 1) -> tuple[str, dict, dict]:
    """Where the estimated peak is, and the parts of the peak, estimated and counted."""
    estimated, counted = memory.bytes_by_moment(m, cfg, ranks), count(m, cfg, ranks)
    when = max(estimated, key=lambda moment: sum(estimated[moment].values()))
    return when, estimated[when], max(counted.values(), key=lambda parts: sum(parts.values()))


def peak_row(first: list, m: MPTConfig, cfg: TrainConfig, ranks: int = 1, parts=()) -> str:
    """A row of the table of peaks: estimated, counted, and how far they are apart."""
    when, estimated, counted = both_peaks(m, cfg, ranks)
    a, b = sum(estimated.values()), sum(counted.values())
    row = [
        *first,
        cfg.activation_checkpointing,
        f"{a / 1e9:.3f}",
        f"{b / 1e9:.3f}",
        f"{a / b - 1:+.2%}",
        when,
    ]
    return table_row(
        row + [f"{estimated[part] / 1e9:.2f}, {counted.get(part, 0) / 1e9:.2f}" for part in parts]
    )


def tracker_row(m: MPTConfig, cfg: TrainConfig, ranks: int) -> str:
    """A row with the peak that torch's own memory tracker finds, too."""
    when, estimated, counted = both_peaks(m, cfg, ranks)
    peak, *others = sum(estimated.values()), sum(counted.values()), tracked(m, cfg, ranks)
    row = [ranks, cfg.sharding if ranks > 1 else "", cfg.activation_checkpointing, when]
    return table_row(
        [
            *row,
            *(f"{n / 1e9:.3f}" for n in (peak, *others)),
            *(f"{peak / n - 1:+.2%}" for n in others),
        ]
    )


def real_row(what: str, m: MPTConfig, how: str) -> str:
    """A row with the peak of a real step, as the CPU's allocator saw it, too."""
    cfg = settings(2, 1, how)
    when, estimated, counted = both_peaks(m, cfg)
    peaks = sum(estimated.values()), sum(counted.values()), allocated(m, cfg)
    return table_row([what, how, when, *(f"{peak / 1e6:.2f}" for peak in peaks)])


def table_row(values: list) -> str:
    """A line of a Markdown table, printed at once and returned."""
    print(*values, flush=True)
    return f"| {' | '.join(map(str, values))} |"


def table(names: str, rows) -> str:
    """A Markdown table of rows that `table_row` made."""
    names = names.split(", ")
    return "\n".join([f"| {' | '.join(names)} |", "|---" * len(names) + "|", *rows])


def main(argv: list[str]) -> None:
    """Count all tables and write them to OUT.md."""
    (out,) = config.arguments(argv, "[OUT.md]") or [ROOT / "bench/results/memory.md"]
    begin = time.perf_counter()
    models = {
        name: config.load([str(ROOT / f"configs/{name}.py")], MPTConfig)[0]
        for name in ("mpt125m", "mpt1b")
    }
    models = {name: dataclasses.replace(m, attn_impl="sdpa") for name, m in models.items()}
    cases = [(name, batch, how) for name in models for how in HOW for batch in (1, 4, 8)]
    small = MPTConfig(
        d_model=256, n_heads=4, n_layers=4, vocab_size=8192, max_seq_len=512, attn_impl="sdpa"
    )
    flat = dataclasses.replace(small, n_layers=2, vocab_size=16384, max_seq_len=16)
    peak = "checkpointing, estimate, counted, difference, at"
    text = DOCUMENT.format(
        date=time.strftime("%Y-%m-%d"),
        python=platform.python_version(),
        torch=torch.__version__,
        several=table(
            f"model, microbatch, {peak}, {', '.join(VARYING)}",
            [
                peak_row([name, batch], models[name], settings(batch, 2, how), parts=VARYING)
                for name, batch, how in cases
            ],
        ),
        one=table(
            f"model, microbatch, {peak}",
            [
                peak_row([name, batch], models[name], settings(batch, 1, how))
                for name, batch, how in cases
            ],
        ),
        sharded=table(
            f"mode, {peak}",
            [
                peak_row([mode], models["mpt1b"], settings(4, 2, how, 8, mode), 8)
                for mode in SHARDING_MODES
                for how in HOW
            ],
        ),
        tracker=table(
            "ranks, mode, checkpointing, peak at, estimate, counted, MemTracker, to the count, to MemTracker",
            [
                tracker_row(models["mpt1b"], settings(4, 1, how, ranks, mode), ranks)
                for ranks, mode in [(1, "DDP"), *((8, mode) for mode in SHARDING_MODES)]
                for how in ("none", "full")
            ],
        ),
        real=table(
            "model, checkpointing, peak at, estimate, counted, allocated",
            [real_row(what, m, how) for what, m in (("A", small), ("B", flat)) for how in HOW],
        ),
        seconds=round(time.perf_counter() - begin),
    )
    Path(out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    config.run(main)

"""What the operations of a training step cost: FLOPs, bytes and kernels, eager and fused.

    with CostLog() as log:
        fsdp_train.train_step(...)
    eager(log.costs)     a kernel for each operation
    fused(log.costs)     a kernel for those that a compiler would merge

An operation reads its inputs from the device's memory and writes its outputs there; what a schema
marks as changed in place is read and written. This also covers operators that this file does not
know. Views and allocations cost nothing (bench/operations.py). Where inputs + outputs are not the
traffic, LOOKUPS, SCATTERS, OVERWRITES below say so. Only matmuls and attention have FLOPs.
Attention counts the scores that the causal mask leaves, and its backward five matmuls, though our
kernels do seven.

An operation counts as one kernel, though some are several (LayerNorm's backward two, the fused
AdamW one for each 300 MB or so). They follow each other at once, and this changes no byte.

How fusion is estimated. The run compiles each block on its own, so only a block's operations are
merged, and those of a forward not with those of a backward. Pointwise operations, reductions, casts
and concatenations can be merged. Matmuls, attention, collectives and all other operators are
borders. Count the borders on the longest path to each operation of a block. Two operations share a
kernel if one reads the other's output and their counts are equal: then no matmul must run in the
middle of a kernel. Only a bias gradient is not merged with what makes its input. The kernel reads
each tensor from outside once, and writes only what is read outside of it, or by nobody. A tensor
that only its own operations read costs nothing. Loss, embeddings, sums of gradients and the
optimizer stay eager.

Inductor makes its schedule without a GPU, too, and a test compares both. For a block of MPT it
moves as many bytes in the forward, and 5 % more in the backward, where it also splits the sums of
LayerNorm's gradients from the rest (torch 2.13). With RoPE and `qk_ln` it moves 12 % more.

`python -m bench step_costs` prints both for a step of a small model on this CPU.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import config
from bench.operations import Operation, OperationLog, small_step
from config import require
from model import Block

# Matmuls, of the last two tensors among their arguments.
MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mpt::add_product_"}
# {attention: its matmuls}, each of queries x visible keys x head dim.
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": 2,
    "aten::_scaled_dot_product_flash_attention_backward": 5,
    "aten::_scaled_dot_product_efficient_attention": 2,
    "aten::_scaled_dot_product_efficient_attention_backward": 5,
    "aten::_scaled_dot_product_cudnn_attention": 2,
    "aten::_scaled_dot_product_cudnn_attention_backward": 5,
    "mpt::flash_attention": 2,
    "mpt::flash_attention_backward": 5,
}
# They read as much of their first tensor as they return.
LOOKUPS = {"aten::embedding", "aten::gather", "aten::index", "aten::index_select"}
# They change as much of their first tensor as the last one has.
SCATTERS = {"aten::scatter_add_", "aten::index_add_", "aten::index_put_"}
# They do not read what they overwrite.
OVERWRITES = {"aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::fill_"}
# Can be merged, though torch does not tag them as pointwise.
MERGED = {
    "aten::_to_copy",
    "aten::copy_",
    "aten::clone",
    "aten::cat",
    "aten::sum",
    "aten::native_layer_norm",
    "aten::native_layer_norm_backward",
    "aten::native_dropout",
    "aten::native_dropout_backward",
}
# They can be merged with what follows, but not with what makes their input: a bias gradient sums
# over rows, which one kernel after the other has written.
READS_ROWS = "aten::sum"
ACCUMULATES = "torch::autograd::AccumulateGrad"  # the sum of gradients, outside of compiled code


class Use(NamedTuple):
    """A part of a tensor's memory that an operation reads or writes."""

    storage: int  # of which tensor; its views have the same
    offset: int  # where in it, in numbers
    bytes: int


@dataclass(frozen=True)
class Cost:
    """One operation and what it costs."""

    operation: Operation
    flops: float
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    # (number of the call of a block, part of the step) if it belongs to a block, else None
    block: tuple[int, str] | None = None
    can_merge: bool = False
    microbatch: int = 1  # 1, 2, ...; 0: before the first one

    @property
    def bytes(self) -> int:
        """What it reads and writes."""
        return sum(use.bytes for use in self.reads + self.writes)


@dataclass(frozen=True)
class Kernel:
    """Operations that the device does at once, and the bytes of all of them together."""

    costs: tuple[Cost, ...]
    bytes: int

    @property
    def flops(self) -> float:
        """Of all its operations."""
        return sum(cost.flops for cost in self.costs)

    @property
    def microbatch(self) -> int:
        """That of its operations."""
        return self.costs[0].microbatch


# --- Counting


class CostLog(OperationLog):
    """An OperationLog that also notes what each operation costs, in `costs`."""

    def __init__(self):
        super().__init__()
        self.costs = []
        self.storages = {}  # {address: weak reference}, which keeps the address from being reused
        self.microbatch = 0
        self.calls = 0  # of blocks
        self.call = None  # the number of the call whose operations come now; None: of no block
        self.call_before = None  # which call of a block made the next one's input
        self.last_output = None  # of a block
        self.hooks = []

    def __enter__(self):
        self.hooks = [
            register_module_forward_pre_hook(self.before_module),
            register_module_forward_hook(self.after_module),
        ]
        return super().__enter__()

    def __exit__(self, kind, error, trace) -> bool:
        for hook in self.hooks:
            hook.remove()
        self.last_output = None
        return super().__exit__(kind, error, trace)

    # --- To which block an operation belongs

    def before_module(self, module, args) -> None:
        """A block begins. When its backward has the gradient of its input, it ends."""
        if not isinstance(module, Block):
            return
        before = self.calls if args[0] is self.last_output else None
        self.calls += 1
        self.call = self.calls
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: setattr(self, "call", before))

    def after_module(self, module, args, output) -> None:
        """A block ends. When the gradient of its output is known, its backward begins."""
        if not isinstance(module, Block):
            return
        call = self.call
        self.call = None
        self.last_output = output
        if output.requires_grad:
            output.register_hook(lambda grad: setattr(self, "call", call))

    def follow_blocks(self, name: str, args) -> None:
        """Count the microbatches, too: each begins with a forward."""
        super().follow_blocks(name, args)
        if "_record_function_enter" in name and args[0] == "forward":
            self.microbatch += 1

    # --- What an operation costs

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        noted = len(self.operations)
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        if result is not NotImplemented and len(self.operations) > noted:
            self.note_cost(operation, args, kwargs or {}, result)
        return result

    def note_cost(self, operation, args, kwargs, result) -> None:
        """Append the cost of the newest operation, unless it copies a tensor onto itself."""
        noted = self.operations[-1]
        arguments = arguments_of(operation, args, kwargs)
        read, changed = read_and_changed(noted.name, arguments)
        known = {self.use(x).storage for x in tensors_in((args, kwargs))}
        made = [x for x in tensors_in(result) if self.use(x).storage not in known]

        reads = tuple(map(self.use, read))
        writes = tuple(map(self.use, changed + made))
        if noted.name in OVERWRITES and reads == writes:
            return  # such as the last step of `x[0] += 1`, which torch leaves out
        self.costs.append(
            Cost(
                noted,
                flops_of(operation, noted.name, arguments),
                *traffic(noted.name, reads, writes),
                block=None if self.call is None else (self.call, noted.part),
                can_merge=can_merge(operation, noted),
                microbatch=self.microbatch,
            )
        )

    def use(self, x: torch.Tensor) -> Use:
        """All of x. A dimension that only repeats it, as `expand` makes, takes no memory."""
        reference = StorageWeakRef(x.untyped_storage())
        self.storages.setdefault(reference.cdata, reference)
        sizes = [size for size, step in zip(x.shape, x.stride(), strict=True) if step]
        return Use(reference.cdata, x.storage_offset(), math.prod(sizes) * x.itemsize)


def tensors_in(tree) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def arguments_of(operation, args, kwargs) -> list[tuple]:
    """[(argument in the operation's schema, its value)], with what is left to its default."""
    arguments = []
    for position, argument in enumerate(operation._schema.arguments):
        value = kwargs.get(argument.name, argument.default_value)
        arguments.append((argument, args[position] if position < len(args) else value))
    return arguments


def read_and_changed(name: str, arguments) -> tuple[list, list]:
    """The tensors that an operation reads, and those of its arguments that it changes."""
    read, changed = [], []
    for argument, value in arguments:
        tensors = tensors_in(value)
        is_changed = argument.alias_info is not None and argument.alias_info.is_write
        if name == "aten::_fused_adamw_" and argument.name == "grads":
            is_changed = False  # only if it unscales them
        if is_changed:
            changed += tensors
        if not (is_changed and (argument.is_out or name in OVERWRITES)):
            read += tensors
    return read, changed


def traffic(name: str, reads, writes) -> tuple[tuple[Use, ...], tuple[Use, ...]]:
    """`reads` and `writes` of an operation, without what it leaves alone of its first tensor."""
    if name not in LOOKUPS | SCATTERS:
        return reads, writes
    first, *others = reads
    touched = writes[0].bytes if name in LOOKUPS else others[-1].bytes
    reads = (first._replace(bytes=min(first.bytes, touched)), *others)
    if name in SCATTERS:
        writes = (reads[0],)
    return reads, writes


def flops_of(operation, name: str, arguments) -> float:
    """FLOPs of a matmul or of attention, else 0.

    UserError for an operator of ours that has a FLOP formula but is neither of them.
    """
    if name in MATMULS:
        tensors = tensors_in([value for argument, value in arguments if not argument.is_out])
        a, b = tensors[-2:]  # (..., m, k), (..., k, n)
        return 2 * a.numel() * b.shape[-1]
    if name not in ATTENTION:
        is_new = name.startswith("mpt::") and operation.overloadpacket in flop_registry
        require(not is_new, f"{name} has FLOPs: add it to MATMULS or ATTENTION of step_costs.py")
        return 0
    named = {argument.name: value for argument, value in arguments}
    query = named.get("query", named.get("q"))  # (B, H, Tq, D)
    key = named.get("key", named.get("k"))  # (B, Hkv, Tk, D)
    n_queries, n_keys = query.shape[2], key.shape[2]
    pairs = n_queries * n_keys
    if named.get("is_causal", named.get("causal")):
        pairs -= n_queries * (n_queries - 1) // 2  # the first query does not see the last keys
    heads, head_dim = query.shape[0] * query.shape[1], query.shape[3]
    return ATTENTION[name] * 2 * heads * pairs * head_dim


def can_merge(operation, noted: Operation) -> bool:
    """Whether a compiler merges this operation with its neighbours."""
    in_graph = noted.where != ACCUMULATES
    return in_graph and (torch.Tag.pointwise in operation.tags or noted.name in MERGED)


# --- Kernels


def eager(costs: list[Cost]) -> list[Kernel]:
    """A kernel for each operation."""
    return [Kernel((cost,), cost.bytes) for cost in costs]


def fused(costs: list[Cost]) -> list[Kernel]:
    """A kernel for each group of operations that are merged, in the order of their last ones."""
    readers = {}  # {storage: the operations that read it, by number}
    for number, cost in enumerate(costs):
        for use in cost.reads:
            readers.setdefault(use.storage, set()).add(number)
    kernels = []
    for group in sorted(groups_of(costs), key=max):
        members = tuple(costs[number] for number in group)
        kernels.append(Kernel(members, bytes_of(members, set(group), readers)))
    return kernels


def groups_of(costs: list[Cost]) -> list[list[int]]:
    """Which operations are merged: lists of their numbers, each number once.

    The level of an operation is how many borders lie before it in its block, at most.
    """
    group_of = {number: [number] for number in range(len(costs))}
    last_writer = {}  # {storage: number of the operation}
    level_after = {}  # {number: level of what the operation writes}
    for number, cost in enumerate(costs):
        found = {last_writer.get(use.storage) for use in cost.reads} - {None}
        sources = [n for n in found if cost.block is not None and costs[n].block == cost.block]
        level = max((level_after[n] for n in sources), default=0)
        level_after[number] = level if cost.can_merge else level + 1
        for use in cost.writes:
            last_writer[use.storage] = number

        if not cost.can_merge or cost.operation.name == READS_ROWS:
            continue
        for source in sources:
            if costs[source].can_merge and level_after[source] == level:
                merge(group_of, source, number)
    return list({id(group): sorted(group) for group in group_of.values()}.values())


def merge(group_of: dict[int, list[int]], a: int, b: int) -> None:
    """Make one group of those of a and b."""
    kept, moved = group_of[a], group_of[b]
    if kept is moved:
        return
    kept += moved
    for number in moved:
        group_of[number] = kept


def bytes_of(members: tuple[Cost, ...], numbers: set[int], readers: dict[int, set]) -> int:
    """What one kernel reads and writes that does the work of `members`, with these numbers."""
    reads, writes, made = set(), set(), set()
    for cost in members:
        reads |= {use for use in cost.reads if use.storage not in made}
        writes |= set(cost.writes)
        made |= {use.storage for use in cost.writes}
    was_there = {use.storage for use in reads}
    for use in list(writes):
        of_this = readers.get(use.storage, set())
        if use.storage not in was_there and of_this and of_this <= numbers:
            writes.discard(use)  # nobody else reads it
    return sum(use.bytes for use in reads) + sum(use.bytes for use in writes)


# --- The program


def table(costs: list[Cost]) -> str:
    """Lines: kernels, FLOPs and bytes of each part of the step, eager and fused."""
    lines = [f"{'':<12}{'':<8}{'kernels':>10}{'MFLOP':>12}{'MB':>10}"]
    for name, kernels in (("eager", eager(costs)), ("fused", fused(costs))):
        parts = dict.fromkeys(kernel.costs[0].operation.part for kernel in kernels)
        for part in parts:
            of_part = [kernel for kernel in kernels if kernel.costs[0].operation.part == part]
            work = sum(kernel.flops for kernel in of_part) / 1e6
            size = sum(kernel.bytes for kernel in of_part) / 1e6
            lines.append(
                f"{part or 'rest':<12}{name:<8}{len(of_part):>10,}{work:>12,.1f}{size:>10.1f}"
            )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Print the costs of a second training step of a small model, on this CPU."""
    config.arguments(argv)
    log = small_step(CostLog)
    print("two layers, two microbatches, bf16")
    print(table(log.costs))


if __name__ == "__main__":
    config.run(main)

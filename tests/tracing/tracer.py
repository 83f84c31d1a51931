"""Every operation that a piece of work gives to its device: which, on what, from where.

    with Tracer() as trace:
        fsdp_train.train_step(...)
    trace.counts()                    Counter({"aten::mm": 38, "aten::add_": 34, ...})

PyTorch turns each call of Python into operations, and each of those into a kernel of the device. On
the way every operation passes through a dispatcher, where a TorchDispatchMode may look at it. The
tracer notes the shapes, dtypes and devices of what goes in and comes out; FLOPs and bytes follow.

On a GPU the host only puts kernels into a queue and runs ahead of them, so the GPU never waits for
Python. If the host must wait until the queue is empty, that costs time. The trace shows where:

    read-backs       the host needs a result: x.item(), `if x:`, nonzero, a boolean mask as an index
    transfers        copies from the host to the device, or back, which is a read-back, too
    across devices   other operations on tensors of two devices, such as a mask that is on the host
    on the host      operations on tensors of the CPU

The tensors may be fake, with shapes but no data: then no device is needed (gpu_runs.py), and no
memory (live_bytes.py).
"""

import collections
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).resolve().parent.parent.parent

# The results of these have a value, or a shape, that the host must know to continue.
READ_BACKS = {
    "aten::_local_scalar_dense",  # item(), float(x), `if x:`
    "aten::item",  # the same in inference mode
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::bincount",
}
# A boolean index is turned into numbers first, by nonzero.
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# In inference mode x.to(...) is one operation, a view unless dtype or device change.
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_foreach_copy_", "aten::to"}
# These allocate or describe memory, but launch no kernel. Nor do views.
NO_KERNEL = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_unsafe_view",
    "aten::lift_fresh",
    "aten::set_",
    "aten::resize_",
    "fsdp::record_grad_output_stream",
}
NOT_OF_A_DEVICE = ("prim", "profiler", "inductor")  # namespaces of bookkeeping
# What collectives are called, by a part of their operation's name without "_".
COLLECTIVES = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
}


class Spec(NamedTuple):
    """What a tensor is, without its data. Of a sharded one: this rank's part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str  # cuda, cpu

    @property
    def bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self):
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True)
class Operation:
    """One operation, as it was dispatched."""

    name: str  # aten::addmm
    part: str  # of the step: forward, backward, optimizer; "" outside of them
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    where: str  # our line that asked for it: model.py:220. Or autograd's node: AddmmBackward0
    reads_back: bool = False
    flops: int = 0  # as torch's FlopCounterMode counts: of attention, all T x T scores

    @property
    def devices(self) -> set[str]:
        """The devices of its tensors.

        A number on the CPU, of shape (), counts only in copies. Elsewhere PyTorch passes its value
        along with the kernel, and nothing waits.
        """
        specs = self.inputs + self.outputs
        devices = {spec.device for spec in specs}
        if self.name in COPIES or devices == {"cpu"}:
            return devices
        return {spec.device for spec in specs if spec.device != "cpu" or spec.shape != ()}

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of all its tensors."""
        return {spec.dtype for spec in self.inputs + self.outputs}

    @property
    def collective(self) -> str:
        """all-gather, reduce-scatter, ..., or "" if it is no collective."""
        namespace, name = self.name.split("::")
        if namespace not in ("c10d", "_c10d_functional"):
            return ""
        letters = name.replace("_", "")
        return next((words for key, words in COLLECTIVES.items() if key in letters), "")

    @property
    def cast(self) -> tuple[torch.dtype, torch.dtype] | None:
        """(from, to) if it copies to another dtype, else None."""
        if self.name not in COPIES:
            return None
        # copy_(to, from); _foreach_copy_ has a list of each
        pair = (self.inputs[-1].dtype, (self.outputs or self.inputs)[0].dtype)
        return pair if pair[0] != pair[1] else None

    def __str__(self):
        inputs = ", ".join(map(str, self.inputs[:4])) + ", ..." * (len(self.inputs) > 4)
        return f"{self.name}({inputs}) at {self.where}"


class Tracer(TorchDispatchMode):
    """A context that notes the operations inside of it, in `operations`.

    It sees compiled code after fusion, as the operations that the compiler left.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile to compile as if this tracer were not there."""
        return True

    def __init__(self):
        super().__init__()
        self.fake_mode = None
        self.operations = []
        self.open_blocks = []  # names of the record_function blocks around the next operation
        # Whether it ends early, because fake tensors cannot continue after its last operation: the
        # shape of that one's result depends on data.
        self.cut_short = False

    def __enter__(self):
        self.fake_mode = fake_mode()
        return super().__enter__()

    def __exit__(self, kind, error, trace) -> bool:
        super().__exit__(kind, error, trace)
        self.cut_short = isinstance(error, DynamicOutputShapeException)
        return self.cut_short

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as an operation on this rank's shard
        kwargs = kwargs or {}
        self.follow_blocks(operation.name(), args)
        result = None
        try:
            result = answer(operation, args, kwargs)
            return result
        finally:  # noted, too, if fake tensors cannot continue after it
            only_shapes = fake_mode() is not self.fake_mode  # DTensor derives some so
            if not only_shapes:
                self.note(operation, args, kwargs, result)

    def follow_blocks(self, name: str, args) -> None:
        """Keep `open_blocks` up to date: `record_function` is an operation, too."""
        if "_record_function_enter" in name:
            self.open_blocks.append(args[0])
        elif "_record_function_exit" in name and self.open_blocks:
            self.open_blocks.pop()

    def note(self, operation, args, kwargs, result) -> None:
        """Append an operation, if a kernel does it."""
        name = operation.name().split(".")[0]
        inputs, outputs = specs_of((args, kwargs)), specs_of(result)
        copies = name == "aten::to" and [x[1:] for x in inputs] != [x[1:] for x in outputs]
        if not (launches(operation, name) or copies) or not inputs + outputs:
            return
        on_device = any(spec.device != "cpu" for spec in inputs)
        self.operations.append(
            Operation(
                name,
                self.open_blocks[0] if self.open_blocks else "",
                inputs,
                outputs,
                where(),
                reads_back=on_device and waits(name, args),
                flops=flops_of(operation, args, kwargs, result),
            )
        )

    # --- What to look for

    def counts(self, part: str | None = None) -> collections.Counter:
        """{name: how often}, in a part of the step, or in all of it."""
        chosen = [op.name for op in self.operations if part in (None, op.part)]
        return collections.Counter(chosen)

    def largest(self) -> int:
        """The numbers in the largest tensor that any operation returns."""
        return max(math.prod(spec.shape) for op in self.operations for spec in op.outputs)

    def read_backs(self) -> list[Operation]:
        """Operations for whose result the host waits."""
        return [op for op in self.operations if op.reads_back]

    def transfers(self, to_host: bool) -> list[Operation]:
        """Copies from the device to the host (which waits for them), or the other way."""
        copies = [op for op in self.operations if len(op.devices) > 1 and op.name in COPIES]
        # copy_(to, from)
        return [op for op in copies if (op.inputs[-1].device != "cpu") == to_host]

    def across_devices(self) -> list[Operation]:
        """Other operations on tensors of several devices."""
        return [op for op in self.operations if len(op.devices) > 1 and op.name not in COPIES]

    def on_the_host(self) -> list[Operation]:
        """Operations all of whose tensors are on the CPU."""
        return [op for op in self.operations if op.devices == {"cpu"}]

    def collectives(self) -> collections.Counter:
        """{"all-gather bfloat16" or another: how often}."""
        found = [op for op in self.operations if op.collective]
        return collections.Counter(
            f"{op.collective} {dtype_name(op.inputs[0].dtype)}" for op in found
        )


# --- Questions about one operation


def answer(operation, args, kwargs):
    """The operation's result. A fake tensor has no data to read back: its item() is 1."""
    try:
        return operation(*args, **kwargs)
    except DataDependentOutputException:
        dtype = next(leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        is_bool = dtype == torch.bool or "equal" in operation.name()
        return True if is_bool else (1.0 if dtype.is_floating_point else 1)


def fake_mode():
    """The mode that makes new tensors fake, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def launches(operation, name: str) -> bool:
    """Whether a device has something to do for it: no view, no allocation, no bookkeeping."""
    is_view = getattr(operation, "is_view", False)
    return not is_view and name not in NO_KERNEL and name.split("::")[0] not in NOT_OF_A_DEVICE


def waits(name: str, args) -> bool:
    """Whether the host must read the result of this operation before it can continue."""
    if name in INDEXING:
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    # repeats as a tensor, without the size of the output
    of_unknown_size = name == "aten::repeat_interleave" and len(args) < 3
    return name in READ_BACKS or of_unknown_size


def flops_of(operation, args, kwargs, result) -> int:
    """FLOPs by torch's formulas, or by ours for our operators: matmuls and attention have some."""
    formula = flop_registry.get(getattr(operation, "overloadpacket", None))
    return formula(*args, **kwargs, out_val=result) if formula else 0


def tensors_in(tree) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def specs_of(tree) -> tuple[Spec, ...]:
    """What the tensors in nested lists, tuples and dictionaries are."""
    return tuple(Spec(tuple(x.shape), x.dtype, x.device.type) for x in tensors_in(tree))


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16, without the name of the library."""
    return str(dtype).removeprefix("torch.")


def where() -> str:
    """Our innermost line, as file:line; in autograd's own part of the backward, its node."""
    frame = sys._getframe(1)
    while frame:
        path = frame.f_code.co_filename
        ours = path.removeprefix(f"{ROOT}/")
        if ours != path and not ours.startswith("tests/tracing") and "site-packages" not in ours:
            return f"{ours}:{frame.f_lineno}"
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    return node.name() if node else "?"

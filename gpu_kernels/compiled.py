"""Triton kernels compiled for a GPU that is not here, and what limits them on that chip.

    python -m gpu_kernels.compiled --chips=sm_90,gfx90a         attention's kernels, heads of 64
    python -m gpu_kernels.compiled --chips=gfx942 --head_dim=128

`for_chip` is a context in which every launch of a Triton kernel compiles it for the named chip and
does not run it. Triton specialises the kernel for its arguments as it would there: the compilers of
NVIDIA (ptxas) and of AMD (LLVM) are in its wheel, and a stand-in for its driver names the chip. So
the arguments may be CPU tensors:

    with compiled.for_chip("gfx90a", flash_attention) as binaries:
        flash_attention.forward_operator(q, k, v, None, None, True, 0.125)
    compiled.facts(binaries["forward_kernel"]).registers

`facts` reads from the binary what a block of threads takes, and `occupancy` computes how many such
blocks a unit of the chip can hold at once. A unit is what runs a block: an SM of NVIDIA's, a
compute unit (CU) of an AMD Instinct, a workgroup processor of two CUs of a Radeon. Each has four
SIMDs, and a warp stays on one of them. So

    warps by registers         = 4 x floor(SIMD's registers / registers that a thread takes)
    blocks by registers        = warps by registers / warps of a block
    blocks by shared memory    = unit's shared memory / (shared memory of a block + reserved)
    blocks by threads          = 4 x SIMD's warps / warps of a block
    blocks by tensor memory    = unit's columns / columns of a block

each rounded down; what a block takes is rounded up to the steps in which it is given out. With one
block on a unit, nothing runs while its warps wait for each other.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch

import config
import program
from program import UserError, require

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction
except ImportError as missing:
    raise UserError(
        "compiling kernels needs triton, which comes with PyTorch for CUDA and ROCm; "
        "on a Linux CPU: pip install 'triton>=3.4'"
    ) from missing

from gpu_kernels import flash_attention

# --- What a chip has room for


@dataclass(frozen=True)
class Limits:
    """What one unit of a chip has room for. A unit has four SIMDs."""

    warps: int  # of a SIMD
    registers: int  # of a SIMD, 32 bits for each thread of a warp
    register_step: int  # a thread's registers are given out in multiples of it
    shared: int  # bytes of a unit
    shared_block: int  # bytes that one block may take
    shared_step: int  # a block's bytes are given out in multiples of it
    reserved: int  # bytes of a block that the system takes
    blocks: int  # of a unit
    tensor_memory: int = 0  # columns


KB = 1024
SIMDS = 4  # of a unit, on all of them
# NVIDIA: CUDA C++ Programming Guide, "Technical specifications per compute capability"; an SM has
# 65,536 registers, 65,536 / 4 SIMDs / 32 threads = 512, in steps of 256 a warp.
# AMD: AMD GPU specifications in ROCm's documentation (sizes of LDS and of registers); LLVM's
# AMDGPUBaseInfo.cpp (steps, warps, blocks). MI100 (gfx908) has 256 registers of each of two kinds.
# fmt: off
LIMITS = {
    "sm_80": Limits(16, 512, 8, 164 * KB, 163 * KB, 128, 1 * KB, 32),
    "sm_86": Limits(12, 512, 8, 100 * KB, 99 * KB, 128, 1 * KB, 16),
    "sm_89": Limits(12, 512, 8, 100 * KB, 99 * KB, 128, 1 * KB, 24),
    "sm_90": Limits(16, 512, 8, 228 * KB, 227 * KB, 128, 1 * KB, 32),
    "sm_100": Limits(16, 512, 8, 228 * KB, 227 * KB, 128, 1 * KB, 32, 512),
    "sm_103": Limits(16, 512, 8, 228 * KB, 227 * KB, 128, 1 * KB, 32, 512),
    "sm_120": Limits(12, 512, 8, 100 * KB, 99 * KB, 128, 1 * KB, 24),
    "sm_121": Limits(12, 512, 8, 100 * KB, 99 * KB, 128, 1 * KB, 24),
    "gfx908": Limits(10, 256, 4, 64 * KB, 64 * KB, 512, 0, 16),
    "gfx90a": Limits(8, 512, 8, 64 * KB, 64 * KB, 512, 0, 16),
    "gfx942": Limits(8, 512, 8, 64 * KB, 64 * KB, 512, 0, 16),
    "gfx950": Limits(8, 512, 8, 160 * KB, 160 * KB, 1280, 0, 16),
    "gfx1100": Limits(16, 1536, 24, 128 * KB, 64 * KB, 512, 0, 32),
    "gfx1101": Limits(16, 1536, 24, 128 * KB, 64 * KB, 512, 0, 32),
    "gfx1102": Limits(16, 1024, 16, 128 * KB, 64 * KB, 512, 0, 32),
    "gfx1200": Limits(16, 1536, 24, 128 * KB, 64 * KB, 512, 0, 32),
    "gfx1201": Limits(16, 1536, 24, 128 * KB, 64 * KB, 512, 0, 32),
}
# fmt: on


def warp_size(arch: str) -> int:
    """Threads that run together: 64 on AMD Instinct, 32 on Radeon and NVIDIA."""
    is_instinct = arch.startswith("gfx9")
    return 64 if is_instinct else 32


# --- Compiling


@dataclass
class Driver:
    """A driver for Triton that claims to run on a given GPU: sm_90, gfx942, ..."""

    arch: str

    def get_current_target(self) -> GPUTarget:
        """The chip to compile for."""
        if self.arch.startswith("gfx"):
            return GPUTarget("hip", self.arch, warp_size(self.arch))
        return GPUTarget("cuda", int(self.arch.removeprefix("sm_")), 32)

    def get_current_device(self) -> str:
        """The key under which Triton caches what it compiled."""
        return self.arch

    def get_current_stream(self, device) -> int:
        """Triton asks for a stream even if it launches nothing."""
        return 0


@contextlib.contextmanager
def for_chip(arch: str, *modules, only: str | None = None) -> Iterator[dict]:
    """Within this context, launches of Triton kernels compile them for `arch` and do not run them.

    Yields {name of the kernel's function: binary}, empty at first. modules: those whose
    `architecture(device)` has to return `arch`, because they choose launch settings by it. only:
    the one kernel to compile; launches of others do nothing. Outputs of the kernels stay as they
    were allocated. UserError if Triton's interpreter is on.
    """
    hint = "start again without TRITON_INTERPRET=1"
    require(not triton.knobs.runtime.interpret, f"interpreted kernels are not compiled: {hint}")
    binaries = {}
    compile_or_run = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **settings):
        if only in (None, kernel.__name__):
            binary = compile_or_run(kernel, *args, grid=grid, warmup=True, **settings)
            binaries[kernel.__name__] = binary

    with contextlib.ExitStack() as changes:
        changes.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        for module in modules:
            answer = mock.patch.object(module, "architecture", lambda device: arch)
            changes.enter_context(answer)
        changes.callback(triton.runtime.driver.set_active, None)  # None: Triton looks for a GPU
        triton.runtime.driver.set_active(Driver(arch))
        yield binaries


def attention_binary(
    arch,
    D,
    pass_name,
    alibi=True,
    causal=True,
    documents=False,
    group=1,
    dtype="bfloat16",
    lengths=(256, 256),
):
    """The binary of one pass ("forward", "dq" or "dkdv") of attention over 4 heads of D on `arch`.

    group: query heads that share a key head. lengths: of queries and of keys.
    """
    q, k = (torch.empty(1, T, 4, D, dtype=getattr(torch, dtype)).transpose(1, 2) for T in lengths)
    k = k[:, ::group]
    slopes = torch.ones(4) if alibi else None
    bounds = torch.zeros(1, 2, lengths[1], dtype=torch.int32) if documents else None
    name = flash_attention.KERNELS[pass_name].__name__
    with for_chip(arch, flash_attention, only=name) as binaries:
        out, lse = flash_attention.forward_operator(q, k, k, slopes, bounds, causal, 0.125)
        flash_attention.backward_operator(out, q, k, k, out, lse, slopes, bounds, causal, 0.125)
    return binaries[name]


# --- Reading the binary


@dataclass
class Facts:
    """What a binary says of itself. None: no tool for it is installed."""

    registers: int | None  # that a thread uses
    taken: int | None  # registers that it takes: more on AMD, where waves_per_eu keeps others out
    spilled: int | None  # bytes of a thread that registers have no room for
    shared: int  # bytes of a block
    tensor_memory: int  # columns of it that a block takes (only sm_100 and sm_103 have it)
    warps: int  # of a block
    warp: int  # threads of a warp
    matrix: int  # matrix instructions in the whole program
    wide_loads: int  # loads of 16 bytes a thread
    binary: bool  # the chip's own format, ELF, came out


def facts(binary) -> Facts:
    """The facts of a binary that `for_chip` compiled."""
    metadata = binary.metadata
    read = amd_facts if metadata.target.backend == "hip" else nvidia_facts
    return Facts(
        shared=metadata.shared,
        tensor_memory=getattr(metadata, "tmem_size", None) or 0,
        warps=metadata.num_warps,
        warp=metadata.target.warp_size,
        **read(binary),
    )


def amd_facts(binary) -> dict:
    """The facts that are in AMD's assembly. registers: of both kinds, where a chip has two."""
    text = binary.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    scratch_bytes = number("private_segment_fixed_size")
    spilled_registers = number("vgpr_spill_count")  # to memory or to registers of the other kind
    return {
        "registers": number("vgpr_count"),
        "taken": int(re.search(r"\.amdhsa_next_free_vgpr (\d+)", text)[1]),
        "spilled": max(scratch_bytes, 4 * spilled_registers),
        "matrix": len(re.findall(r"\bv_(mfma|wmma)_", text)),  # Instinct, Radeon
        "wide_loads": len(re.findall(r"\b(global|buffer)_load_(dwordx4|b128)", text)),
        "binary": binary.asm["hsaco"][:4] == b"\x7fELF",
    }


def nvidia_facts(binary) -> dict:
    """The facts that are in PTX, and what cuobjdump reads from the binary."""
    ptx = binary.asm["ptx"]
    usage = resource_usage(binary.asm["cubin"])
    matrix = {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma", 103: r"tcgen05\.mma"}
    wide_load = r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10"
    registers = usage and int(re.search(r"\bREG:(\d+)", usage)[1])
    return {
        "registers": registers,
        "taken": registers,
        "spilled": usage and sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)),
        "matrix": len(re.findall(matrix.get(binary.metadata.target.arch, r"mma\.sync"), ptx)),
        "wide_loads": len(re.findall(wide_load, ptx)),
        "binary": binary.asm["cubin"][:4] == b"\x7fELF",
    }


def resource_usage(cubin: bytes) -> str | None:
    """What NVIDIA's cuobjdump says of a binary; None if this Triton does not have the tool."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    if not os.path.exists(tool):
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# --- How many blocks a unit can hold


@dataclass
class Occupancy:
    """The blocks that a unit can hold at once."""

    blocks: int
    limited_by: str  # what runs out first: registers, shared memory, ...
    share: float  # of the warps that a unit has room for


def warps_by_registers(limits: Limits, registers: int) -> int:
    """The warps that a SIMD has registers for, at so many a thread."""
    return limits.registers // round_up(max(registers, 1), limits.register_step)


def occupancy(limits: Limits, facts: Facts) -> Occupancy:
    """By the formula above. 0 blocks if one does not fit."""
    by_registers = SIMDS * warps_by_registers(limits, facts.taken)
    shared = round_up(facts.shared + limits.reserved, limits.shared_step)
    room = {
        "registers": by_registers // facts.warps,
        "shared memory": limits.shared // shared if shared else limits.blocks,
        "threads": SIMDS * limits.warps // facts.warps,
        "blocks": limits.blocks,
    }
    if facts.tensor_memory:
        room["tensor memory"] = limits.tensor_memory // facts.tensor_memory
    if facts.shared > limits.shared_block:
        room["shared memory"] = 0
    blocks = min(room.values())
    scarce = [name for name, fit in room.items() if fit == blocks]
    return Occupancy(blocks, ", ".join(scarce), blocks * facts.warps / (SIMDS * limits.warps))


def round_up(n: int, step: int) -> int:
    """The smallest multiple of `step` that is at least n."""
    return -(-n // step) * step


# --- The program


@dataclass
class ChipArgs:
    """For which chips, and heads of which width."""

    chips: str = "sm_90,gfx90a"  # some of LIMITS, separated by commas
    head_dim: int = 64  # width of a head

    def check(self) -> None:
        """UserError for an unknown chip or a width that the kernels do not take."""
        for arch in self.chips.split(","):
            known = ", ".join(LIMITS)
            require(arch in LIMITS, f"no chip {program.shown(arch)}: choose from {known}")
        require(1 <= self.head_dim <= 128, f"head_dim is {self.head_dim}, expected 1 to 128")


HEADS = "chip,pass,registers,spilled bytes,shared KB,matrix instructions,blocks,limited by".split(
    ","
)


def row(arch: str, head_dim: int, pass_name: str) -> list:
    """What the kernel of one pass takes on a chip, and the blocks that a unit can hold."""
    found = facts(attention_binary(arch, head_dim, pass_name))
    figures = [found.registers, found.spilled, f"{found.shared / KB:.4g}", found.matrix]
    if found.registers is None:
        return [arch, pass_name, "n/a", "n/a", *figures[2:], "n/a", "n/a"]
    held = occupancy(LIMITS[arch], found)
    return [arch, pass_name, *figures, held.blocks, held.limited_by]


def main(argv: list[str]) -> None:
    """Compile attention's kernels, bf16, causal, with ALiBi, and print what they take."""
    (args,) = config.load(argv, ChipArgs)
    archs = args.chips.split(",")
    print(f"compiling {3 * len(archs)} kernels, a few seconds each", file=sys.stderr)
    passes = [(arch, name) for arch in archs for name in flash_attention.KERNELS]
    rows = [row(arch, args.head_dim, name) for arch, name in passes]
    print(f"heads of {args.head_dim}; compiled, not run: nothing here is a speed")
    print(program.table(HEADS, rows))


if __name__ == "__main__":
    program.run(main)

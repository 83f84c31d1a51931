"""Triton kernels compiled for a GPU that is not here, and what the binary says of itself.

`for_chip` is a context in which every launch of a Triton kernel compiles it for the named chip and
does not run it. Triton specialises the kernel for its arguments as it would there: the compilers of
NVIDIA (ptxas) and of AMD (LLVM) are in its wheel, and a stand-in for its driver names the chip. So
the arguments may be CPU tensors:

    with compiled.for_chip("gfx90a", flash_attention) as binaries:
        flash_attention.forward_operator(q, k, v, None, None, True, 0.125)
    compiled.facts(binaries["forward_kernel"]).registers
"""

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fast import flash_attention

KB = 1024
# Shared memory that one block of threads may take on each chip, bytes.
# NVIDIA: CUDA C++ Programming Guide, "Technical specifications per compute capability".
# AMD: AMD GPU specifications in ROCm's documentation (sizes of LDS).
SHARED = {"sm_80": 163 * KB, "sm_86": 99 * KB, "sm_89": 99 * KB, "sm_90": 227 * KB}
SHARED |= {"sm_100": 227 * KB, "sm_103": 227 * KB, "sm_120": 99 * KB, "sm_121": 99 * KB}
SHARED |= {"gfx908": 64 * KB, "gfx90a": 64 * KB, "gfx942": 64 * KB, "gfx950": 160 * KB}
SHARED |= {f"gfx{n}": 64 * KB for n in (1100, 1101, 1102, 1200, 1201)}


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
    were allocated.
    """
    assert not triton.knobs.runtime.interpret, "interpreted kernels are not compiled"
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
    softcap=None,
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
        settings = slopes, bounds, causal, 0.125, softcap
        out, lse = flash_attention.forward_operator(q, k, k, *settings)
        flash_attention.backward_operator(out, q, k, k, out, lse, *settings)
    return binaries[name]


# --- Reading the binary


@dataclass
class Facts:
    """What a binary says of itself. None: no tool for it is installed."""

    registers: int | None  # that a thread uses
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
    return {
        "registers": usage and int(re.search(r"\bREG:(\d+)", usage)[1]),
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

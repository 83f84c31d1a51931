"""Triton kernels compiled for a GPU that is not here, and what the binary says of itself.

    python -m bench compiled                 attention's forward for an MI250 and an H100
    python -m bench compiled sm_80,gfx942    for others

`for_chip` is a context in which every launch of a Triton kernel compiles it for the named chip and
does not run it. Triton specialises the kernel for its arguments as it would there: the compilers of
NVIDIA (ptxas) and of AMD (LLVM) are in its wheel, and a stand-in for its driver names the chip. So
the arguments may be CPU tensors:

    with compiled.for_chip("gfx90a", flash_attention) as binaries:
        flash_attention.forward_operator(q, k, v, None, None, True, 0.125)
    compiled.facts(binaries["forward_kernel"]).registers

`facts` reads registers, spills, shared memory and instructions from the binary, `assembly` returns
its instructions as text. bench/chips.py makes a table of them, for every chip.
"""

import contextlib
import dataclasses
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
from config import UserError, require

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction
except ImportError as missing:
    raise UserError(
        "compiling kernels needs triton, which comes with PyTorch for CUDA and ROCm; "
        "on a Linux CPU: pip install 'triton>=3.4'"
    ) from missing

from gpu_kernels import flash_attention, launch_table

# --- Compiling


def warp_size(arch: str) -> int:
    """Threads that run together: 64 on AMD Instinct, 32 on Radeon and NVIDIA."""
    is_instinct = arch.startswith("gfx9")
    return 64 if is_instinct else 32


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
    usage = output_of_tool("cuobjdump", "-res-usage", binary.asm["cubin"])
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


def assembly(binary) -> str | None:
    """The instructions of the binary as text; None if NVIDIA's disassembler is not installed."""
    if "amdgcn" in binary.asm:
        return binary.asm["amdgcn"]
    return output_of_tool("nvdisasm", "-c", binary.asm["cubin"])


def output_of_tool(name: str, flag: str, cubin: bytes) -> str | None:
    """What one of NVIDIA's tools prints of a binary; None if this Triton does not have the tool."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
    if not os.path.exists(tool):
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# --- The program


def main(argv: list[str]) -> None:
    """Compile attention's forward over heads of 64 for some chips, and print the facts."""
    words = config.arguments(argv, "[CHIPS]") or ["gfx90a,sm_90"]
    archs = words[0].split(",")
    known = [*dict.fromkeys(arch for arch, _ in launch_table.LAUNCH), *launch_table.SAME_ROWS]
    for arch in archs:
        require(arch in known, f"no chip {config.shown(arch)}: choose from {', '.join(known)}")
    q = torch.empty(1, 256, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    for arch in archs:
        with for_chip(arch, flash_attention) as binaries:
            flash_attention.forward_operator(q, q, q, None, None, True, 0.125)
        for name, binary in binaries.items():
            print(arch, name, dataclasses.asdict(facts(binary)))
    print("python -m bench chips prints a table of all chips", file=sys.stderr)


if __name__ == "__main__":
    config.run(main)

"""compiled.py: compiling without a GPU, and what a binary takes."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need triton: see requirements-dev.txt")
import compiled  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402


@triton.jit
def double_kernel(x, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, 2 * tl.load(x + i))


@triton.jit
def triple_kernel(x, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, 3 * tl.load(x + i))


@pytest.mark.parametrize("arch", ["sm_90", "gfx90a"])
def test_any_kernel_is_compiled_and_not_run(arch):
    x = torch.ones(1024)
    before = JITFunction.run
    with compiled.for_chip(arch, only="double_kernel") as binaries:
        double_kernel[(4,)](x, BLOCK=256)
        triple_kernel[(4,)](x, BLOCK=256)
    assert JITFunction.run is before
    assert list(binaries) == ["double_kernel"] and x.eq(1).all()

    facts = compiled.facts(binaries["double_kernel"])
    assert facts.binary and facts.warp == compiled.warp_size(arch) and facts.warps == 4
    assert 0 < facts.registers < 64 and facts.spilled == 0 and facts.matrix == 0

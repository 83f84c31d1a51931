"""gpu_kernels/compiled.py: compiling without a GPU, what a binary takes, occupancy."""

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need triton: see requirements-dev.txt")
import triton.language as tl  # noqa: E402
from test_launch_table import UNLESS_CHANGED  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from gpu_kernels import compiled  # noqa: E402
from gpu_kernels.compiled import LIMITS, Facts, occupancy  # noqa: E402
from program import UserError  # noqa: E402

# --- Occupancy


def block(warps, registers, shared=0, tensor_memory=0):
    """The facts of a kernel of which only these matter."""
    counts = dict(spilled=0, warp=32, matrix=1, wide_loads=1, binary=True)
    counts |= dict(registers=registers, taken=registers, shared=shared, warps=warps)
    return Facts(tensor_memory=tensor_memory, **counts)


@pytest.mark.parametrize(
    "arch, facts, blocks, limited_by, share",
    [
        # CUDA C++ Best Practices Guide, "Calculating occupancy": 37 registers a thread, on an SM
        # with 65,536 registers and 64 warps: 12 blocks of 128 threads, 75 %; 4 of 320, 63 %.
        ("sm_80", block(4, 37), 12, "registers", 0.75),
        ("sm_80", block(10, 37), 4, "registers", 0.625),
        # LLVM's documentation of llvm-calc-occupancy: 512 threads, 50 registers: 8 waves a SIMD.
        ("gfx90a", block(8, 50), 4, "registers, threads", 1),
        # By hand: 512 / 200 = 2 warps a SIMD; 228 KB / (128 + 1) KB = 1.
        ("sm_90", block(8, 198, 128 * 1024), 1, "registers, shared memory", 8 / 64),
        # 40.5 KB and 1 KB reserved: 164 / 41.5 = 3; 512 / 88 = 5 warps a SIMD.
        ("sm_80", block(4, 84, 81 * 512), 3, "shared memory", 12 / 64),
        # Blocks of fewer warps than SIMDs: 12 and 4 warps a SIMD, on four of them.
        ("sm_90", block(1, 40), 32, "blocks", 32 / 64),
        ("sm_90", block(2, 128), 8, "registers", 16 / 64),
        # 512 / 256 = 2 warps a SIMD; 100 / (98 + 1) = 1.
        ("sm_120", block(8, 255, 98 * 1024), 1, "registers, shared memory", 8 / 48),
        # 256 / 84 = 3 warps a SIMD; 64 / 16 = 4.
        ("gfx908", block(4, 84, 16 * 1024), 3, "registers", 12 / 40),
        ("gfx942", block(4, 128, 32 * 1024), 2, "shared memory", 8 / 32),
        # 48 KB are 39 steps of 1,280 bytes; 160 KB / 39 steps = 3. 512 / 128 = 4.
        ("gfx950", block(4, 128, 48 * 1024), 3, "shared memory", 12 / 32),
        ("sm_100", block(8, 74, 56 * 1024, tensor_memory=256), 2, "tensor memory", 16 / 64),
        # 1536 / 216 = 7 warps a SIMD, 2 of each block.
        ("gfx1100", block(8, 200, 16 * 1024), 3, "registers", 24 / 64),
        ("gfx1100", block(4, 24), 16, "threads", 1),
        # 1536 / 264 = 5 warps a SIMD, 20 on four of them.
        ("gfx1101", block(8, 250, 8 * 1024), 2, "registers", 16 / 64),
        # 128 / 24 = 5.
        ("gfx1200", block(4, 96, 24 * 1024), 5, "shared memory", 20 / 64),
        # More than one block may take, though the WGP has it.
        ("gfx1100", block(4, 24, 65 * 1024), 0, "shared memory", 0),
    ],
)
def test_occupancy(arch, facts, blocks, limited_by, share):
    found = occupancy(LIMITS[arch], facts)
    assert (found.blocks, found.limited_by, found.share) == (blocks, limited_by, share)


# --- Compiling


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


AMD = [
    pytest.param(arch, marks=pytest.mark.slow if arch == "gfx90a" else UNLESS_CHANGED)
    for arch in LIMITS
    if arch.startswith("gfx")
]


@pytest.mark.parametrize("arch", AMD)
def test_amds_compiler_counts_the_same_warps(arch):
    """It prints the warps that fit on a SIMD, by registers alone."""
    for name in ("forward", "dkdv"):
        binary = compiled.attention_binary(arch, 64, name)
        printed = re.search(r"; Occupancy: (\d+)", binary.asm["amdgcn"])[1]
        warps = compiled.warps_by_registers(LIMITS[arch], compiled.facts(binary).taken)
        assert min(warps, LIMITS[arch].warps) == int(printed)


# --- The program


@pytest.mark.slow
def test_the_program_prints_what_limits_each_kernel(capsys):
    compiled.main(["--chips=sm_90,gfx90a"])
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["chip", "pass", "registers"]
    cells = [re.split(r"  +", row.strip()) for row in rows]
    assert [cell[:2] for cell in cells] == [
        [arch, name] for arch in ("sm_90", "gfx90a") for name in ("forward", "dq", "dkdv")
    ]
    for _, _, registers, spilled, _, matrix, blocks, _ in cells:
        assert 100 < int(registers) <= 512 and int(spilled) == 0
        assert int(matrix) > 0 and int(blocks) >= 1


def test_bad_settings_are_one_clear_line(monkeypatch):
    with pytest.raises(UserError, match="no chip 'sm_91': choose from sm_80, .*gfx908"):
        compiled.main(["--chips=sm_90,sm_91"])
    with pytest.raises(UserError, match="head_dim is 256, expected 1 to 128"):
        compiled.main(["--head_dim=256"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match="start again without TRITON_INTERPRET=1"):
        compiled.main(["--chips=sm_90"])

"""bench chips: compiling without a GPU, instructions of the inner loop, occupancy, the table."""

import json
import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need triton: see requirements-dev.txt")
import triton.language as tl  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from bench import chips, compiled, inner_loop  # noqa: E402
from bench.chips import LIMITS, occupancy  # noqa: E402
from bench.compiled import Facts  # noqa: E402
from config import UserError  # noqa: E402

# --- Instructions of the inner loop

# NVIDIA's text: an outer loop (.L_x_0) around two inner ones. Threads of the first that wait do so
# behind the end, and come back. The second has as many matrix instructions and one other more.
SASS = """
        /*0000*/                   S2R R5, SR_TID.X ;
        /*0010*/                   BSSY B0, `(.L_x_9) ;
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, RZ ;
.L_x_0:
        /*0030*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4.reuse, R6, R8 ;
        /*0050*/               @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0060*/              @!P1 HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0070*/                   FADD R1, R2, R3 ;
        /*0080*/              @!P2 BRA `(.L_x_1) ;
.L_x_4:
        /*0090*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*00a0*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*00b0*/                   FADD R1, R2, R3 ;
        /*00c0*/                   FADD R1, R2, R3 ;
        /*00d0*/                   FMUL R1, R2, R3 ;
        /*00e0*/                   FMUL R1, R2, R3 ;
        /*00f0*/                   NOP ;
        /*0100*/                   NOP ;
        /*0110*/                   BRA.U UP0, `(.L_x_4) ;
        /*0120*/               @P3 BRA `(.L_x_0) ;
.L_x_9:
        /*0130*/                   EXIT ;
.L_x_2:
        /*0140*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0150*/               @P0 BRA `(.L_x_2) ;
        /*0160*/                   BRA `(.L_x_3) ;
"""

# AMD's text: a loop without matrix instructions, then one with, inside another.
AMDGCN = """
	.text
kernel:                                 ; @kernel
.Lfunc_begin0:
	.loc	1 247 0                         ; flash_attention.py:247:0
; %bb.0:
	s_load_b64 s[6:7], s[0:1], 0x28
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	v_add_f32_e32 v1, v2, v3
	s_cbranch_scc0 .LBB0_1
.Ltmp1:
	s_branch .LBB0_3
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
	v_mfma_f32_32x32x8bf16_1k v[64:79], v[120:121], v[80:81], 0
	s_waitcnt lgkmcnt(0)
.Ltmp2:
	.loc	2 250 40                        ; standard.py:250:40
	v_dual_mov_b32 v3, 0 :: v_dual_and_b32 v4, 31, v0
	s_cbranch_scc1 .LBB0_2
.LBB0_3:
	s_cbranch_scc1 .LBB0_2
	s_endpgm
	.amdgpu_metadata
    .name:           kernel
"""


def test_the_loop_with_the_largest_share_is_counted_with_its_waits():
    loop = inner_loop.find(SASS)
    assert (loop.instructions, loop.matrix) == (5 + 3, 2)  # the first inner loop, and its wait
    assert loop.share == 0.25
    assert loop.flops_per_instruction == 2 * (2 * 16 * 8 * 16) / 8


def test_matrix_instructions_of_the_outer_loop_do_not_count():
    line = "/*0030*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;\n"
    assert inner_loop.find(SASS.replace(".L_x_1:\n", line * 9 + ".L_x_1:\n")).share == 0.25


def test_a_kernel_may_begin_with_its_loop():
    assert inner_loop.find(SASS[SASS.index(".L_x_4:") :]).instructions == 9


def test_a_loop_of_amds():
    loop = inner_loop.find(AMDGCN)
    assert (loop.instructions, loop.matrix, loop.flops) == (4, 1, 2 * 32 * 32 * 8)


def test_no_loop_has_matrix_instructions():
    straight = "\t" + "\n\t".join(["v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15]", "s_endpgm"])
    assert inner_loop.find(straight) is None
    assert inner_loop.find(AMDGCN.replace("v_mfma", "v_madd")) is None
    assert inner_loop.find("") is None


@pytest.mark.parametrize(
    "instruction, flops",
    [
        ("HMMA.16816.F32.BF16 R48, R60.reuse, R136, RZ", 2 * 16 * 8 * 16),
        ("HMMA.1688.F32.TF32 R48, R60, R136, RZ", 2 * 16 * 8 * 8),
        ("HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24, gsb0", 2 * 64 * 128 * 16 // 4),
        ("v_mfma_f32_16x16x16_bf16 v[64:67], v[120:121], v[80:81], 0", 2 * 16**3),
        ("v_wmma_f32_16x16x16_bf16 v[129:136], v[65:72], v[1:8], v[121:128]", 2 * 16**3),
        ("UTCHMMA gdesc[UR16], gdesc[UR24], tmem[UR15], tmem[UR42], idesc[UR43], UPT", None),
    ],
)
def test_flops_of_a_matrix_instruction(instruction, flops):
    assert inner_loop.MATRIX.match(instruction)
    assert inner_loop.flops_of(instruction) == flops


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
        ("sm_86", block(4, 24, 0), 12, "threads", 1),
        # 512 / 168 = 3 warps a SIMD.
        ("sm_89", block(8, 168, 48 * 1024), 1, "registers", 8 / 48),
        # Blocks of fewer warps than SIMDs: 12 and 4 warps a SIMD, on four of them.
        ("sm_90", block(1, 40), 32, "blocks", 32 / 64),
        ("sm_90", block(2, 128), 8, "registers", 16 / 64),
        # 3 warps a SIMD; 228 / (64 + 1) = 3; 512 / 128 = 4.
        (
            "sm_103",
            block(4, 168, 64 * 1024, tensor_memory=128),
            3,
            "registers, shared memory",
            12 / 64,
        ),
        # 512 / 256 = 2 warps a SIMD; 100 / (98 + 1) = 1.
        ("sm_120", block(8, 255, 98 * 1024), 1, "registers, shared memory", 8 / 48),
        # 100 / (30 + 1) = 3.
        ("sm_121", block(4, 64, 30 * 1024), 3, "shared memory", 12 / 48),
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
        # 1024 / 176 = 5.
        ("gfx1102", block(4, 170, 16 * 1024), 5, "registers", 20 / 64),
        # 128 / 24 = 5.
        ("gfx1200", block(4, 96, 24 * 1024), 5, "shared memory", 20 / 64),
        # 1536 / 192 = 8, 32 on four SIMDs.
        ("gfx1201", block(16, 192), 2, "registers", 32 / 64),
        # More than one block may take, though the WGP has it.
        ("gfx1100", block(4, 24, 65 * 1024), 0, "shared memory", 0),
    ],
)
def test_occupancy(arch, facts, blocks, limited_by, share):
    found = occupancy(LIMITS[arch], facts)
    assert (found.blocks, found.limited_by, found.share) == (blocks, limited_by, share)


def test_flops_a_cycle():
    """Peak of a product / units / clock / SIMDs; a Radeon's unit has two of the rows' units."""
    a100, h100 = 312e12 / 108 / 1.41e9 / 4, 989.4e12 / 132 / 1.83e9 / 4
    assert chips.flops_per_cycle("sm_80") == pytest.approx(a100, rel=0.005)
    assert chips.flops_per_cycle("sm_90") == pytest.approx(h100, rel=0.005)
    mi250, radeon = 181.05e12 / 104 / 1.7e9 / 4, 122.9e12 / 48 / 2.5e9 / 4
    assert chips.flops_per_cycle("gfx90a") == pytest.approx(mi250, rel=0.005)
    assert chips.flops_per_cycle("gfx1100") == pytest.approx(radeon, rel=0.005)
    assert chips.flops_per_cycle("sm_89") is None
    assert "n/a" in chips.limits_table(["sm_89"]) and "1,024 |" in chips.limits_table(["sm_90"])


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
    assert inner_loop.find(compiled.assembly(binaries["double_kernel"])) is None


def test_a_row_of_the_table():
    """dq on an H100. A turn has three matmuls of 128 x 64 scores and heads of 64, by 8 warps."""
    row = chips.kernel_row("sm_90", 64, "dq")
    assert row["error"] == "" and row["spilled_bytes"] == 0
    assert 100 < row["registers"] == row["registers_taken"] <= 255
    assert row["work"] == 1 and row["loop_matrix"] > 0
    flops = row["loop_instructions"] * row["flops_per_instruction"]
    assert flops == pytest.approx(3 * 2 * 128 * 64 * 64 / 8)
    assert f"| {row['registers']} | 0 |" in chips.kernel_table([row])


def test_bad_settings_are_one_clear_line():
    with pytest.raises(UserError, match="no chip 'sm_91': choose from sm_80, "):
        chips.main(["--chips=sm_90,sm_91"])
    with pytest.raises(UserError, match="head_dim is 256, expected 1 to 128"):
        chips.main(["--head_dim=256"])
    with pytest.raises(UserError, match="no chip 'h100': choose from sm_80, .*gfx908"):
        compiled.main(["sm_90,h100"])


def test_interpreted_kernels_are_one_clear_line_and_no_row(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match="start again without TRITON_INTERPRET=1"):
        chips.rows_of_chip("sm_90", (64,))


def test_without_a_good_row_there_is_no_page(tmp_path, monkeypatch):
    bad = [chips.empty_row("sm_90", 64, "dq", "too old")]
    monkeypatch.setattr(chips, "all_rows", lambda archs, head_dims: bad)
    with pytest.raises(UserError, match="could compile none of these kernels"):
        chips.main(["--chips=sm_90", f"--out={tmp_path / 'page.md'}"])
    assert not (tmp_path / "page.md").exists()


def test_a_binary_file_has_no_loop(tmp_path):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(b"\x7fELF\xff\xfe\x80")
    with pytest.raises(UserError, match="no loop of .*kernel.cubin has matrix instructions"):
        inner_loop.main([str(path)])


# --- Every chip


@pytest.mark.slow
def test_every_chip(python, tmp_path):
    page = tmp_path / "page.md"
    words = ["chips", "--head_dim=64", "--json", f"--out={page}"]
    rows = json.loads(python(*words, program="bench").stdout)
    assert [(row["chip"], row["pass"]) for row in rows] == [
        (arch, name) for arch in LIMITS for name in ("forward", "dq", "dkdv")
    ]
    for row in rows:
        assert row["error"] == ""
        assert row["blocks"] >= 1 and 0 < row["occupancy"] <= 1
        assert 0.01 < row["matrix_share"] < 0.5
        size_is_in_the_text = row["chip"] not in ("sm_100", "sm_103")
        assert row["work"] == (1 if size_is_in_the_text else None)
    text = page.read_text()
    assert all(f"| {arch} | 64 | dkdv |" in text for arch in LIMITS)
    assert triton.__version__ in text


@pytest.mark.slow
def test_a_chip_that_the_compiler_does_not_know_has_no_figures():
    """There is no sm_99: the compiler aborts its process."""
    unknown, *_, known = chips.all_rows(["sm_99", "sm_90"], (64,))
    assert "the compiler aborted" in unknown["error"] and unknown["registers"] is None
    assert known["error"] == "" and known["registers"] > 0
    assert chips.kernel_table([unknown]).count("n/a") == 10


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in LIMITS if arch.startswith("gfx")])
def test_amds_compiler_counts_the_same_warps(arch):
    """It prints the warps that fit on a SIMD, by registers alone."""
    for name in ("forward", "dkdv"):
        binary = chips.attention_binary(arch, 64, name)
        printed = re.search(r"; Occupancy: (\d+)", compiled.assembly(binary))[1]
        warps = chips.warps_by_registers(LIMITS[arch], compiled.facts(binary).taken)
        assert min(warps, LIMITS[arch].warps) == int(printed)

"""launch_table.py: every row, with the kernels it belongs to, compiled for its chip. No GPU is needed to compile.

In processes of their own Triton is told which chip it has, and the operators of flash_attention.py run on CPU tensors
up to the launch: Triton specialises and compiles for the arguments as it would there, and does not start the kernel.
What is read from the binary: shared memory, registers that spilled to memory, matrix instructions, the width of a
wavefront. Resource use shifts with the compiler: it is held for the triton of constraints.txt, and loosely for others.
"""

import functools
import os
import re
import subprocess
import tempfile

import pytest
import torch
from conftest import ROOT, Ranks

triton = pytest.importorskip("triton", reason="the kernels need triton: see requirements-dev.txt")

from gpu_kernels import flash_attention, launch_table  # noqa: E402
from gpu_kernels.launch_table import LAUNCH, UNKNOWN, row_for  # noqa: E402

SHARED = {
    "sm_80": 166_912,
    "sm_90": 232_448,
    "gfx90a": 65_536,
    "gfx942": 65_536,
    "gfx950": 163_840,
}  # bytes a block
PASSES = ("forward", "dq", "dkdv")

# Bytes a thread may keep in memory instead of in registers, where it is not 0. Smaller blocks spill nothing there, and
# share less of what they load.
SPILLS = {
    ("sm_80", 128, "dkdv"): 32,  # heads of 80; 16 with heads of 96, 0 with 128
    ("sm_90", 128, "dkdv"): 96,  # grouped heads; 8 without ALiBi, 0 with it
}
SLACK = (
    0 if f"triton=={triton.__version__}\n" in (ROOT / "constraints.txt").read_text() else 256
)  # of other compilers


# --- compiling


class Chip:
    """Triton's driver for a GPU that is not there."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return (
            GPUTarget("hip", self.arch, 64)
            if self.arch[0] == "g"
            else GPUTarget("cuda", int(self.arch[3:]), 32)
        )

    def get_current_device(self):
        return self.arch  # Triton keeps what it compiled by device

    def get_current_stream(self, device):
        return 0


class StandIn:
    """Stands where a kernel stands: when it is launched it is compiled instead, if it is wanted."""

    def __init__(self, kernel, wanted):
        self.kernel, self.wanted, self.binary = kernel, wanted, None

    def __getitem__(self, grid):
        return functools.partial(self.compile, grid)

    def compile(self, grid, **arguments):
        if self.wanted:
            self.binary = self.kernel.run(grid=grid, warmup=True, **arguments)


def binary_of(
    arch,
    D,
    what,
    alibi=True,
    causal=True,
    documents=False,
    group=1,
    dtype="bfloat16",
    lengths=(256, 256),
):
    """The binary of one pass over 4 heads on `arch`, as it would be launched there."""
    triton.runtime.driver.set_active(Chip(arch))
    q, k = (torch.empty(1, T, 4, D, dtype=getattr(torch, dtype)).transpose(1, 2) for T in lengths)
    k = k[:, ::group]
    slopes = torch.ones(4) if alibi else None
    bounds = torch.zeros(1, 2, lengths[1], dtype=torch.int32) if documents else None
    kernels = {
        name: StandIn(kernel, name == what) for name, kernel in flash_attention.KERNELS.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attention, "architecture", lambda device: arch)
        patch.setattr(flash_attention, "KERNELS", kernels)
        out, lse = flash_attention.forward_operator(q, k, k, slopes, bounds, causal, 0.125)
        flash_attention.backward_operator(out, q, k, k, out, lse, slopes, bounds, causal, 0.125)
    return kernels[what].binary


def facts(binary, arch):
    """What the binary says of itself."""
    found = {"shared": binary.metadata.shared, "warp": binary.metadata.target.warp_size}
    if arch.startswith("gfx"):
        text = binary.asm["amdgcn"]
        scratch = re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1]  # bytes
        spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1]  # registers
        return found | {
            "spilled": int(scratch) + int(spilled),
            "matrix": len(re.findall(r"\bv_mfma_", text)),
            "wide_loads": len(re.findall(r"\b(global|buffer)_load_dwordx4", text)),
            "binary": binary.asm["hsaco"][:4] == b"\x7fELF",
        }
    dump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [dump, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    instruction = r"wgmma\.mma_async" if arch == "sm_90" else r"mma\.sync"
    return found | {
        "spilled": sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", text)),
        "matrix": len(re.findall(instruction, binary.asm["ptx"])),
        "wide_loads": len(
            re.findall(
                r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", binary.asm["ptx"]
            )
        ),
        "binary": binary.asm["cubin"][:4] == b"\x7fELF",
    }


def share(world, cases):
    """The facts of every second case, or what it raised."""
    results = []
    for arch, D, what, settings in cases[world.global_rank :: world.global_size]:
        try:
            results.append(facts(binary_of(arch, D, what, **settings), arch))
        except Exception as error:
            results.append(repr(error)[:500])
    return results


# --- the matrix

USUAL_CHIPS = ("gfx90a", "sm_90")  # MI250, H100
USUAL = [dict(alibi=True), dict(alibi=False)]
CASES = [(arch, D, what, s) for arch in SHARED for D in (64, 128) for what in PASSES for s in USUAL]
OTHERS = [
    dict(causal=False),
    dict(documents=True),
    dict(group=4),
    dict(dtype="float16"),
    dict(dtype="float32"),
]
OTHERS += [
    dict(lengths=(1, 77)),
    dict(lengths=(1, 1), documents=True),
    dict(lengths=(33, 77), causal=False),
]
MORE = [(arch, D, what, s) for arch in SHARED for D in (64, 128) for what in PASSES for s in OTHERS]
MORE += [(arch, 96, what, s) for arch in SHARED for what in PASSES for s in USUAL]
MORE += [
    (arch, D, what, dict(alibi=True)) for arch in SHARED for D in (32, 80, 112) for what in PASSES
]


def name(case):
    arch, D, what, settings = case
    return f"{arch}-{D}-{what}-" + ",".join(f"{k}={v}" for k, v in settings.items())


def all_facts(compilers, cases):
    """{name of a case: facts}, one chip after another, shared by two processes."""
    results = {}
    for arch in SHARED:
        mine = [case for case in cases if case[0] == arch]
        for rank, part in enumerate(compilers(share, mine)):
            results |= dict(zip(map(name, mine[rank::2]), part, strict=True))
    return results


@pytest.fixture(scope="module")
def compilers():
    """Two processes to compile in."""
    pool = Ranks(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def found(compilers, request):
    """{name of a case: facts} of the cases of this session."""
    wanted = {item.name.partition("[")[2][:-1] for item in request.session.items}
    return all_facts(compilers, [case for case in CASES + MORE if name(case) in wanted])


def in_tiers(cases, tiers):
    """tiers: the marks of a case of one of the two usual chips, and of another."""
    first, second = tiers
    return [
        pytest.param(case, id=name(case), marks=first if case[0] in USUAL_CHIPS else second)
        for case in cases
    ]


def check(case, found):
    arch, D, what, settings = case
    assert isinstance(found, dict), found
    assert found["binary"] and found["warp"] == (64 if arch.startswith("gfx") else 32)
    assert found["shared"] <= SHARED[arch]
    if settings.get("dtype") == "float32":
        return  # the conservative row: it must run, not shine
    assert found["matrix"] > 0
    assert found["wide_loads"] > 0 or D < 64  # 16 bytes a thread
    assert found["spilled"] <= SPILLS.get((arch, 64 if D <= 64 else 128, what), 0) + SLACK


@pytest.mark.parametrize("case", in_tiers(CASES, ([], pytest.mark.slow)))
def test_a_row_fits_its_chip(case, found):
    check(case, found[name(case)])


@pytest.mark.parametrize("case", in_tiers(MORE, (pytest.mark.slow, pytest.mark.long)))
def test_it_fits_with_every_feature(case, found):
    check(case, found[name(case)])


def too_large(world):
    launch_table.row_for = lambda *_: (128, 128, 4, 2, 2)
    return facts(binary_of("gfx942", 128, "forward"), "gfx942")


def test_a_row_that_is_too_large_is_seen(compilers):
    """The check can fail: these blocks do not fit an MI300X."""
    found = compilers(too_large)[0]
    compilers.stop()  # they have the wrong row now
    with pytest.raises(AssertionError):
        check(("gfx942", 128, "forward", {}), found)


# --- the lookup


def test_every_chip_has_all_rows_and_only_amd_has_amds_options():
    for (arch, _), passes in LAUNCH.items():
        assert set(passes) == set(PASSES)
        for row in passes.values():
            assert ("waves_per_eu" in launch_table.options(row)) == arch.startswith("gfx")
            assert row[2] <= 16
    assert {arch for arch, _ in LAUNCH} == set(SHARED)


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("head_dim, column", [(16, 64), (64, 64), (65, 128), (96, 128), (128, 128)])
def test_a_head_takes_the_narrowest_rows_that_hold_it(arch, head_dim, column, capsys):
    for what in PASSES:
        assert row_for(arch, head_dim, what, torch.bfloat16) == LAUNCH[arch, column][what]
        assert row_for(arch, head_dim, what, torch.float32) == UNKNOWN
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arch", ["gfx1201", "sm_121"])
def test_an_unknown_chip_takes_the_conservative_row_and_says_so_once(arch, capsys):
    launch_table.rows_of.cache_clear()
    for what in PASSES:
        assert row_for(arch, 64, what, torch.bfloat16) == UNKNOWN
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and arch in said and "--tune" in said


def test_the_name_of_a_gpu(monkeypatch):
    class Properties:
        gcnArchName = "gfx942:sramecc+:xnack-"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    assert launch_table.architecture(gpu) == "sm_90"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert launch_table.architecture(gpu) == "gfx942"
    assert launch_table.architecture(torch.device("cpu")) == "cpu"


def test_the_fastest_candidate_wins_and_those_that_do_not_fit_are_left_out(capsys):
    rows = launch_table.candidates()
    assert len(rows) == len(set(rows)) > 20 and UNKNOWN[:2] in {row[:2] for row in rows}

    def launch(row=None):
        if row and row[0] == 128:
            raise RuntimeError("out of resource: shared memory")
        return row

    best = launch_table.fastest("dq", launch, lambda run: 9.0 if run() is None else sum(run()))
    assert best == min((row for row in rows if row[0] < 128), key=sum)
    said = capsys.readouterr()
    assert "dq" in said.out and "9.000" in said.out and "RuntimeError" in said.err

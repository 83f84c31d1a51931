"""launch_table.py: rows, compiled for their chips with the kernels they belong to. No GPU needed.

Two chips in the quick tier, three more in the slow one, the others in the long one.

In processes of their own, the operators of flash_attention.py run on CPU tensors up to the launch,
which compiles the kernel as on that chip and does not start it (compiled.py). The
binary says how much shared memory it takes, how many registers spilled to memory, and whether it
uses matrix instructions.

The numbers shift with the compiler: limits are exact for the triton of constraints.txt, and loose
for other versions.
"""

import dataclasses
import itertools

import pytest
import torch
from conftest import ROOT

triton = pytest.importorskip("triton", reason="the kernels need triton: see requirements-dev.txt")

import compiled  # noqa: E402
from compiled import SHARED, attention_binary, warp_size  # noqa: E402

from fast import launch_table  # noqa: E402
from fast.launch_table import LAUNCH, SAME_ROWS, UNKNOWN, row_for  # noqa: E402
from program import UserError  # noqa: E402

TENSOR_MEMORY = 512  # columns of it that a block may take
PASSES = ("forward", "dq", "dkdv")

# Bytes that a thread may spill, where it is not 0. Smaller blocks would spill nothing, but would
# also reuse less of what they load: on an H200, sm_90's dq is 1.23 times as fast as with 128 x 64.
SPILLS = {
    ("sm_80", 128, "dkdv"): 32,  # heads of 80; 16 with heads of 96, 0 with 128
    ("sm_86", 128, "dq"): 8,  # heads of 96
    ("sm_86", 128, "dkdv"): 104,  # sm_120 with heads of 96; sm_86: at most 32
    ("sm_90", 128, "dq"): 56,  # 0 with documents
    ("sm_90", 128, "dkdv"): 136,  # grouped heads; else 8
    ("sm_100", 64, "dq"): 32,  # sm_103 with documents; sm_100 16, also if not causal
    ("sm_100", 128, "dkdv"): 360,  # grouped heads on sm_103; 336 to 352 on sm_100, else 0
    ("gfx908", 128, "forward"): 8,  # heads of 96 without ALiBi
    ("gfx1100", 128, "forward"): 296,  # documents of one token; 16 with heads of 96, else 0
    ("gfx1100", 128, "dq"): 156,  # heads of 96; 12 with heads of 80, else 0
    ("gfx1100", 128, "dkdv"): 112,  # 68 to 112; 0 with heads of 80 and 96
}
PINNED = f"triton=={triton.__version__}\n" in (ROOT / "constraints.txt").read_text()
SLACK = 0 if PINNED else 384  # bytes more, for other versions of the compiler


# --- compiling


def facts(binary):
    """What the test checks: shared memory (bytes), warp size, spilled bytes, instructions."""
    of_one_warp = binary.asm.get("ptx", "").count("mma.sync")  # also where larger ones exist
    return dataclasses.asdict(compiled.facts(binary)) | {"of one warp": of_one_warp}


def share(world, cases):
    """{name: facts, or the error's text} of this process's part of the cases."""
    results = {}
    for case in cases[world.global_rank :: world.global_size]:
        arch, D, pass_name, settings = case
        try:
            results[name(case)] = facts(attention_binary(arch, D, pass_name, **settings))
        except Exception as error:
            results[name(case)] = repr(error)[:500]
    return results


# --- the matrix


FEW_CHIPS = ("sm_80", "sm_90", "gfx90a", "gfx942", "gfx1100")
USUAL_CHIPS = ("gfx90a", "sm_90")  # MI250, H100
USUAL = [dict(alibi=True), dict(alibi=False)]
# What needs the most registers.
HARDEST = {
    "forward": dict(alibi=True),
    "dq": dict(alibi=True),
    "dkdv": dict(documents=True, group=4),
}
OTHERS = [dict(causal=False), dict(documents=True), dict(group=4)]
OTHERS += [dict(dtype="float16"), dict(dtype="float32"), dict(softcap=30.0)]
OTHERS += [dict(lengths=(1, 77)), dict(lengths=(1, 1), documents=True)]
OTHERS += [dict(lengths=(33, 77), causal=False)]
OF_A_STEP = dict(lengths=(1, 512), documents=True, group=4)  # takes ONE_QUERY


def cases_of(head_dims, settings, archs=SHARED):
    """(architecture, head dim, pass, settings) for all passes."""
    return list(itertools.product(archs, head_dims, PASSES, settings))


CASES = [
    (arch, D, pass_name, HARDEST[pass_name])
    for arch, D, pass_name in itertools.product(SHARED, (64, 128), PASSES)
]
CASES += [(arch, D, "forward", OF_A_STEP) for arch, D in itertools.product(SHARED, (64, 128))]
MORE = [case for case in cases_of((64, 128), USUAL) if case not in CASES]
MORE += cases_of((64, 128), OTHERS)
MORE += cases_of((96,), USUAL)
MORE += cases_of((32, 80, 112), [dict(alibi=True)])


def name(case):
    """A test id."""
    arch, D, pass_name, settings = case
    return f"{arch}-{D}-{pass_name}-" + ",".join(f"{k}={v}" for k, v in settings.items())


@pytest.fixture(scope="module")
def found(ranks, request):
    """{name of a case: facts} of the cases of this session; two processes share them."""
    wanted = {item.name.partition("[")[2][:-1] for item in request.session.items}
    cases = [case for case in CASES + MORE if name(case) in wanted]
    results = {}
    for begin in range(0, len(cases), 16):  # a call has a time limit
        first, second = ranks(2)(share, cases[begin : begin + 16])
        results |= first | second
    return results


def marked(case):
    """A case as a parameter: quick on the usual chips, slow on a few, long on the others.

    But the pass that takes most of a chip's shared memory is slow on all.
    """
    arch, D, pass_name, _ = case
    is_slow = arch in FEW_CHIPS or (D, pass_name) == (128, "dkdv")
    other = pytest.mark.slow if is_slow else pytest.mark.long
    return pytest.param(case, id=name(case), marks=[] if arch in USUAL_CHIPS else other)


def check(case, found):
    """The binary fits the chip, uses its matrix instructions, and spills no more than allowed."""
    arch, D, pass_name, settings = case
    assert isinstance(found, dict), found
    assert found["binary"]
    assert found["warp"] == warp_size(arch)
    assert found["shared"] <= SHARED[arch]
    assert found["tensor_memory"] <= TENSOR_MEMORY
    if settings.get("dtype") == "float32" or settings.get("softcap"):
        return  # no row was chosen for these: it must fit, and need not be fast
    is_one_query = pass_name == "forward" and settings.get("lengths", (0, 0))[0] == 1
    assert found["matrix"] + is_one_query * found["of one warp"] > 0
    assert found["wide_loads"] > 0 or D < 64  # 16 bytes a thread
    owner = SAME_ROWS.get(arch, arch)
    allowed = SPILLS.get((owner, 64 if D <= 64 else 128, pass_name), 0) + SLACK
    assert found["spilled"] <= allowed


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_a_row_fits_its_chip(case, found):
    check(case, found[name(case)])


@pytest.mark.long
@pytest.mark.parametrize("case", MORE, ids=name)
def test_it_fits_with_every_feature(case, found):
    check(case, found[name(case)])


# --- the lookup


def test_every_chip_has_all_rows_and_only_amd_has_amds_options():
    for (arch, _), passes in LAUNCH.items():
        assert set(passes) == set(PASSES)
        for row in passes.values():
            assert ("waves_per_eu" in launch_table.options(row)) == arch.startswith("gfx")
            assert row[2] <= 16
    owners = {arch for arch, _ in LAUNCH}
    assert set(SAME_ROWS.values()) <= owners and not owners & set(SAME_ROWS)
    assert owners | set(SAME_ROWS) == set(SHARED)


@pytest.mark.parametrize("head_dim, column", [(64, 64), (65, 128), (128, 128)])
def test_a_head_takes_the_narrowest_rows_that_hold_it(head_dim, column, capsys):
    for arch, pass_name in itertools.product(SHARED, PASSES):
        expected = LAUNCH[SAME_ROWS.get(arch, arch), column][pass_name]
        assert row_for(arch, head_dim, pass_name, torch.bfloat16) == expected
        assert row_for(arch, head_dim, pass_name, torch.float32) == UNKNOWN
    one_query = row_for("sm_90", head_dim, "forward", torch.bfloat16, n_queries=1)
    assert one_query == launch_table.ONE_QUERY
    assert capsys.readouterr().err == ""


def test_an_unknown_chip_takes_the_fallback_row_and_says_so_once(capsys):
    launch_table.rows_of.cache_clear()
    for pass_name in PASSES:
        assert row_for("gfx1151", 64, pass_name, torch.bfloat16) == UNKNOWN
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "gfx1151" in message and "--tune" in message


@pytest.mark.parametrize("arch", ["sm_75", "gfx906"])
def test_a_chip_without_matrix_instructions_is_refused(arch):
    with pytest.raises(UserError, match=rf"matrix instructions .*\({arch}\): use attn_impl=sdpa"):
        row_for(arch, 64, "forward", torch.float16)


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

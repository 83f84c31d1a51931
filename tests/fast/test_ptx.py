"""Compiled kernels, run by ptx_interpreter.py: equal to fp64, and planted faults are found."""

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need triton: see requirements-dev.txt")
import triton.language as tl  # noqa: E402
from ptx_interpreter import Fault, Unsupported, on  # noqa: E402

from fast import cross_entropy, flash_attention  # noqa: E402

LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}  # as in test_flash_attention.py


# --- A small kernel


@triton.jit
def product_kernel(a, b, out, N: tl.constexpr):
    """out = a b^T, (N, N) each."""
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    at = tl.program_id(0) * N * N + i * N + j
    tl.store(out + at, tl.dot(tl.load(a + at), tl.trans(tl.load(b + at))))


def product(arch, blocks=1, **settings):
    """The error of a product of small integers, which bf16 holds exactly."""
    torch.manual_seed(0)
    a, b = (torch.randint(-8, 8, (64, 64)).bfloat16() for _ in range(2))
    out = torch.empty(64, 64)
    with on(arch, **settings) as binaries:
        product_kernel[(blocks,)](a, b, out, N=64)
    assert binaries["product_kernel"].asm["ptx"]
    return (out - a.float() @ b.float().T).abs().max().item()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_product(arch):
    assert product(arch) == 0


def test_an_address_outside_of_the_tensors_and_an_unknown_instruction_are_named():
    with pytest.raises(Fault, match="outside of the kernel's tensors: .*ld.global"):
        product("sm_80", blocks=2)
    with pytest.raises(Unsupported, match="ldmatrix2"):
        product("sm_80", change=lambda name, ptx: ptx.replace("ldmatrix", "ldmatrix2"))


# --- The project's kernels

FIRST = dict(D=64)  # causal, ALiBi, two heads that share a key head
CASES = [
    ("sm_80", dict(D=96, n_keys=140)),
    ("sm_80", dict(D=64, causal=False, dtype="float16")),
    ("sm_90", FIRST),
    ("sm_90", dict(D=128, documents=True, alibi=False, Hkv=2)),
    ("sm_80", dict(D=64, window=40, softcap=2.0)),
    ("sm_90", dict(D=64, softcap=2.0)),
]
MORE = [dict(D=64, dtype="float32"), *(case for _, case in CASES)]
OTHER_CHIPS = ("sm_86", "sm_89", "sm_120")


def at_length(arch):
    """A chip of the long tier."""
    return pytest.param(arch, marks=pytest.mark.long)


def attention_errors(dtype="bfloat16", **case):
    """Errors of out, dq, dk, dv against fp64, relative to the largest exact value."""
    lengths = dict(n_queries=130, n_keys=130)
    return flash_attention.compare("cpu", getattr(torch, dtype), **(lengths | case))


@pytest.mark.slow
@pytest.mark.parametrize("arch, case", CASES, ids=str)
def test_attention_as_compiled_equals_fp64(arch, case):
    with on(arch, flash_attention):
        errors = attention_errors(**case)
    assert max(errors) < LIMITS[case.get("dtype", "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", *map(at_length, OTHER_CHIPS)])
def test_the_loss_as_compiled_equals_fp64(arch):
    with on(arch, cross_entropy):
        losses, log_z, gradient = cross_entropy.compare("cpu", torch.bfloat16, rows=6)
    assert max(losses, log_z) < 1e-5 and gradient < 8e-3


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", *OTHER_CHIPS])
@pytest.mark.parametrize("case", MORE, ids=str)
def test_attention_as_compiled_equals_fp64_on_all_chips(arch, case):
    test_attention_as_compiled_equals_fp64(arch, case)


# --- Planted faults


def planted(kernel: str, pattern: str, new: str):
    """A change of one kernel's PTX. The pattern must be in it."""

    def change(name, ptx):
        if name != kernel:
            return ptx
        wrong, count = re.subn(pattern, new, ptx)
        assert count > 0
        return wrong

    return change


FAULTS = {
    "guards of loads removed": (
        *("sm_80", "dkdv", r"@%p\d+ (ld\.global)", r"\1"),
        "outside of the kernel's tensors",
    ),
    "a register that nothing has written": (
        *("sm_90", "dq", r"mov\.u32 \t%r\d+, %ctaid\.y;", ""),
        "an uninitialised register is",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("arch, pass_name, pattern, new, message", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_named(arch, pass_name, pattern, new, message):
    change = planted(f"{pass_name}_kernel", pattern, new)
    with on(arch, flash_attention, change=change), pytest.raises(Fault, match=message):
        attention_errors(**FIRST)


def test_a_changed_operand_gives_a_wrong_result():
    """The first of two fragments of each mma takes the place of the second."""
    swapped = planted("product_kernel", r"(mma\.sync.*?\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2")
    assert product("sm_80", change=swapped) > 10

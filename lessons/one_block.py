"""FlashAttention's forward for one block of queries: the smallest kernel that shows the idea.

    python -m lessons.one_block               in Triton's interpreter, against float64 (no GPU)
    python -m lessons.one_block compile       compiled for an MI250 and an H100, without either

`one_block_kernel` has no heads, no batch and no mask except for the end of the sequence. It walks
over blocks of keys and keeps, for each query, the largest score m, the sum l of exp(score - m), and
the sum o of exp(score - m) * v. The project's kernel, fast/flash_attention.py, has the same
loop; the program runs it, too. Lesson 4 shows what this program prints.
"""

# ruff: noqa: E741 (`l` is the name in the papers)

import os
import platform
import re
import sys

import torch

import program
from fast import flash_attention
from program import require

try:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError as missing:
    raise ImportError("lessons/one_block.py needs triton, which runs on Linux") from missing


@triton.jit
def one_block_kernel(
    q, k, v, out, n_keys, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = softmax(q k^T * scale) v. q, out: (BLOCK_M, D); k, v: (n_keys, D); row by row."""
    d = tl.arange(0, D)
    rows = tl.arange(0, BLOCK_M)
    q_block = tl.load(q + rows[:, None] * D + d[None, :])  # (BLOCK_M, D)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)  # the largest score so far
    l = tl.zeros([BLOCK_M], tl.float32)  # the sum of exp(score - m)
    o = tl.zeros([BLOCK_M, D], tl.float32)  # the sum of exp(score - m) * v

    for start in range(0, n_keys, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        exists = j < n_keys  # the last block may be shorter
        k_block = tl.load(k + j[:, None] * D + d[None, :], mask=exists[:, None], other=0.0)
        v_block = tl.load(v + j[:, None] * D + d[None, :], mask=exists[:, None], other=0.0)

        s = tl.dot(q_block, tl.trans(k_block), input_precision="ieee") * scale
        s = tl.where(exists[None, :], s, -float("inf"))  # (BLOCK_M, BLOCK_N)
        m_new = tl.maximum(m, tl.max(s, 1))
        shrink = tl.exp(m - m_new)  # moves the old sums to the new maximum
        p = tl.exp(s - m_new[:, None])
        l = l * shrink + tl.sum(p, 1)
        o = o * shrink[:, None]
        o += tl.dot(p.to(v_block.dtype), v_block, input_precision="ieee")
        m = m_new

    o = o / l[:, None]
    tl.store(out + rows[:, None] * D + d[None, :], o.to(out.dtype.element_ty))


def one_block_attention(q, k, v, block_n: int):
    """softmax(q k^T / sqrt(D)) v by `one_block_kernel`, in steps of block_n keys.

    q: (Tq, D), Tq and D powers of two, at least 16; k, v: (Tk, D). Returns (Tq, D).
    """
    n_queries, D = q.shape
    out = torch.empty_like(q)
    sizes = {"D": D, "BLOCK_M": n_queries, "BLOCK_N": block_n}
    one_block_kernel[(1,)](q, k, v, out, len(k), D**-0.5, **sizes)
    return out


# --------------------------------------------------------------------------------------------------
# In the interpreter

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # as in the tests


def interpret() -> None:
    """Compare both kernels with float64. UserError if one is too far from it."""
    print(f"interpreted: {versions()}\n")
    print("one_block_kernel: one block of 16 queries, 40 keys of width 32, in steps of 16 keys")
    errors = {dtype: [one_block_error(dtype)] for dtype in (torch.float32, torch.float16)}
    show(("relative to float64", "out"), errors)
    print("\nfast/flash_attention.py, 2 heads of 64, 80 tokens, causal, with ALiBi")
    dtypes = (torch.float32, torch.bfloat16)
    errors = {dtype: flash_attention.compare("cpu", dtype, Hkv=2) for dtype in dtypes}
    show(("relative to float64", "out", "dq", "dk", "dv"), errors)


def show(heads: tuple, errors_by_dtype: dict) -> None:
    """Print the largest errors of each dtype, relative to the largest exact value."""
    rows = []
    for dtype, errors in errors_by_dtype.items():
        require(max(errors) < LIMITS[dtype], f"a kernel is wrong in {dtype}: {errors}")
        rows.append((dtype, *(f"{error:.1e}" for error in errors)))
    print(program.table(heads, rows))


def one_block_error(dtype) -> float:
    """The largest error of `one_block_attention`, relative to the largest exact value."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 32).to(dtype) for n in (16, 40, 40))
    exact = torch.softmax(q.double() @ k.double().T * 32**-0.5, dim=-1) @ v.double()
    error = one_block_attention(q, k, v, block_n=16) - exact
    return (error.abs().max() / exact.abs().max()).item()


# --------------------------------------------------------------------------------------------------
# Compiled for a GPU that is not here

# For each chip: what Triton compiles for, the name of its assembly, and its matrix instructions.
CHIPS = {
    "MI250": (GPUTarget("hip", "gfx90a", 64), "amdgcn", r"v_mfma_\S+"),
    "H100": (GPUTarget("cuda", 90, 32), "ptx", r"wgmma\.mma_async\S+"),
}
SIZES = {"D": 64, "BLOCK_M": 128, "BLOCK_N": 64}


def compile_for_gpus() -> None:
    """Print what `one_block_kernel` becomes on an MI250 and an H100. UserError if it errs."""
    print(f"compiled, not run, fp16, {SIZES}: {versions()}\n")
    types = dict.fromkeys(("q", "k", "v", "out"), "*fp16") | {"n_keys": "i32", "scale": "fp32"}
    source = ASTSource(one_block_kernel, types | dict.fromkeys(SIZES, "constexpr"), SIZES)
    rows = []
    for chip, (target, kind, pattern) in CHIPS.items():
        binary = triton.compile(source, target=target, options={"num_warps": 8})
        found = re.findall(pattern, binary.asm[kind])
        require(found, f"no matrix instructions for the {chip}: lesson 4 errs")
        rows.append((f"{chip}: {kind}", f"{binary.metadata.shared / 1024:g}", len(found), found[0]))
    print(program.table(("chip: assembly", "KB shared", "matrix instructions", "the first"), rows))


# --------------------------------------------------------------------------------------------------
# The program


def versions() -> str:
    """What ran it."""
    python = platform.python_version()
    return f"Python {python}, torch {torch.__version__}, triton {triton.__version__}"


def main(argv) -> None:
    """Run both kernels in the interpreter, or compile them."""
    if program.wants_help(argv):
        program.show_help()
    require(argv in ([], ["compile"]), "usage: python -m lessons.one_block [compile]")
    if argv:
        compile_for_gpus()
    elif flash_attention.INTERPRETED.value:
        interpret()
    else:
        # Triton reads the variable when a kernel is decorated, so the program starts again.
        restart = [sys.executable, "-m", "lessons.one_block"]
        os.execve(sys.executable, restart, os.environ | {"TRITON_INTERPRET": "1"})


if __name__ == "__main__":
    program.run(main)

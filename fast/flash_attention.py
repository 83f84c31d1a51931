"""FlashAttention-2 with ALiBi in Triton, forward and backward: one source for NVIDIA and AMD GPUs.

Attention is out = softmax(S) v with S = q k^T * scale + bias. S has Tq x Tk elements per head and
is never stored. Formulas below use one head, q (Tq, D), k and v (Tk, D).

Forward, for one block of queries (one program of the grid):

    1. load the block of q; start with m = -infinity, l = 0, o = 0, for each row
    2. for each block of keys that a row can see:
           s  = q k^T * scale + bias               scores of the block
           m' = max(m, rowmax(s))                  the largest score so far
           p  = exp(s - m')
           l  = l * exp(m - m') + rowsum(p)        the sum of exp(score - m')
           o  = o * exp(m - m') + p v              the unnormalised output
           m  = m'
    3. store out = o / l and lse = m + log l

This online softmax is exact: the factor exp(m - m') moves the sums to the new maximum. The backward
keeps out and lse (one number per row), and gets the probabilities back as P = exp(S - lse).

Backward, with do the gradient of out:

    delta = rowsum(do * out)       equals rowsum(P * dP), one number per row
    dP = do v^T
    dS = P * (dP - delta)
    dv = P^T do
    dq = dS k * scale
    dk = dS^T q * scale

dq sums over keys; dk and dv sum over queries, and over the query heads that share a key head. One
program could compute all three, but then many programs would add to the same dq with atomics, in an
order that changes from run to run. So there are two kernels: `dq_kernel` owns a block of queries
(and stores delta), `dkdv_kernel` owns a block of keys. S and dP are computed twice, seven matmuls
instead of five. In exchange every sum has one owner and one order: two runs are equal bit for bit.

ALiBi lowers the score of query i and key j <= i by slope * (i - j). What is constant in a row
leaves the softmax unchanged, so a program adds only slope * (j - origin), a vector over its keys,
and corrects lse by slope * (i - origin) (`row_bias`). `origin` is the first position of the
program's block: that keeps the numbers small, where fp32 is precise. Slopes are fp32. Without
causality the bias is -slope * |i - j|, computed for each element.

A query sees one interval of keys, first <= j < last: causality limits its end, a window its begin,
a packed document both ends, the length of the sequence all of it. Blocks outside of it are skipped.
Blocks that lie inside of it for all rows of a program need no mask, so causality costs one only on
the diagonal (with documents or a window, every block has a mask).

A softcap c (Gemma 2) makes c * tanh(s / c) of each score before the bias. Its derivative,
1 - tanh(s / c)^2, is one more factor of dS.

Powers of two: the GPU has an instruction for 2^x, not for e^x. So scale, softcap and slopes are
multiplied by log2(e), exp becomes exp2, and lse is a logarithm to base 2.

NVIDIA and AMD run the same source. What differs is data, in fast/launch_table.py: a wavefront of an
AMD Instinct has 64 threads, and a compute unit of an MI250 or MI300 has 64 KiB of shared memory
(LDS) where an H100 has 227, so AMD gets smaller blocks, and mostly one pipeline stage.

    python -m fast.flash_attention           compare with float64
    python -m fast.flash_attention --tune    time launch settings, print rows for the table
                                             (--tune=64, --tune=128: of one head dim)

Without a GPU the comparison runs in Triton's interpreter.

Dao, FlashAttention-2 (2023), algorithms 1 and 2; Press et al., ALiBi (2021), section 3.
"""

import functools
import math
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import program
from fast import launch_table
from fast.launch_table import architecture
from program import UserError, require

try:
    import triton
    import triton.language as tl
except ImportError as missing:
    raise UserError(
        "attn_impl=triton needs triton, which comes with PyTorch for CUDA and ROCm: use "
        "attn_impl=sdpa, or on a Linux CPU pip install 'triton>=3.4'"
    ) from missing

LOG2E = tl.constexpr(math.log2(math.e))
# With TRITON_INTERPRET=1 kernels run in NumPy, on the CPU.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


# --- parts of a kernel
#
# Widths of Triton's tensors are powers of two. A block of rows of one head is therefore a tuple:
# (BLOCK, LOW) alone for heads of 64 or 128, (BLOCK, LOW) and (BLOCK, HIGH) for a head of 96, which
# is 64 + 32 rather than 128. `split` chooses LOW and HIGH.


@triton.jit
def block_pointers(
    x, strides, b, h, start, n,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Pointers to rows start .. start + BLOCK, columns FIRST .. FIRST + WIDTH of head h of batch b.

    Returns (pointers, exists), (BLOCK, WIDTH) each: the head has n rows and D columns.
    """
    row = (
        b.to(tl.int64) * strides[0]
        + h.to(tl.int64) * strides[1]
        + tl.cast(start, tl.int64) * strides[2]
    )
    i = tl.arange(0, BLOCK)
    d = FIRST + tl.arange(0, WIDTH)
    exists = (i < n - start)[:, None]
    if FIRST + WIDTH > D:
        exists = exists & (d < D)[None, :]
    return x + row + i[:, None] * strides[2] + d[None, :], exists


@triton.jit
def load_rows(
    x, strides, b, h, start, n,
    BLOCK: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + BLOCK of one head of n rows; zeros beyond the last row."""
    pointers, exists = block_pointers(x, strides, b, h, start, n, BLOCK, 0, LOW, D)
    low = tl.load(pointers, mask=exists, other=0.0)
    if HIGH == 0:
        return (low,)
    else:
        pointers, exists = block_pointers(x, strides, b, h, start, n, BLOCK, LOW, HIGH, D)
        return (low, tl.load(pointers, mask=exists, other=0.0))


@triton.jit
def store_rows(
    x, strides, b, h, start, n, rows, factor,
    BLOCK: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Write rows * factor to where `load_rows` reads."""
    pointers, exists = block_pointers(x, strides, b, h, start, n, BLOCK, 0, LOW, D)
    tl.store(pointers, (rows[0] * factor).to(x.dtype.element_ty), mask=exists)
    if HIGH > 0:
        pointers, exists = block_pointers(x, strides, b, h, start, n, BLOCK, LOW, HIGH, D)
        tl.store(pointers, (rows[1] * factor).to(x.dtype.element_ty), mask=exists)


@triton.jit
def zeros(BLOCK: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """A block of rows of zeros, fp32: an accumulator."""
    if HIGH == 0:
        return (tl.zeros([BLOCK, LOW], tl.float32),)
    else:
        return (tl.zeros([BLOCK, LOW], tl.float32), tl.zeros([BLOCK, HIGH], tl.float32))


@triton.jit
def dot(a, b, total=None):
    """a b + total in fp32. `ieee`: fp32 inputs are not rounded to tf32, which not every GPU has."""
    if INTERPRETED:  # the interpreter would multiply the raw bits of bf16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def rows_dot_rows(a, b):
    """a b^T: (M, D), (N, D) -> (M, N)."""
    s = dot(a[0], tl.trans(b[0]))
    if len(a) == 2:
        s = dot(a[1], tl.trans(b[1]), s)
    return s


@triton.jit
def add_product(total, factor, p, rows):
    """total * factor + p rows: (M, D), (M, N), (N, D) -> (M, D). p is rounded to rows' dtype."""
    p = p.to(rows[0].dtype)
    if len(rows) == 1:
        return (dot(p, rows[0], total[0] * factor),)
    else:
        low = dot(p, rows[0], total[0] * factor)
        return (low, dot(p, rows[1], total[1] * factor))


@triton.jit
def alibi(i, j, origin, slope, CAUSAL: tl.constexpr):
    """The bias of queries i and keys j, which broadcast.

    If causal, it lacks a term that is constant in a row, slope * (i - origin): see `row_bias`.
    """
    if CAUSAL:
        return slope * (j - origin).to(tl.float32)
    else:
        return -slope * tl.abs(i - j).to(tl.float32)


@triton.jit
def row_bias(i, origin, slope, CAUSAL: tl.constexpr):
    """The term that `alibi` omits in row i. The stored lse is the true one: without this term."""
    return slope * (i - origin).to(tl.float32) * CAUSAL


@triton.jit
def capped(s, softcap):
    """(softcap * tanh(s / softcap), its derivative 1 - tanh^2); None: (s, 1.0)."""
    if softcap is None:
        return s, 1.0
    else:
        tanh = 2 * tl.sigmoid(2 * s / softcap) - 1
        return softcap * tanh, 1 - tanh * tanh


@triton.jit
def document_of(bounds, b, position, n_keys):
    """Where the document of each position begins, and where it ends (exclusive).

    bounds: pointer to (B, 2, Tk) int32, or None: the whole row is one document. With a window, they
    are its ends where those are nearer.
    """
    if bounds is None:
        return tl.zeros_like(position), tl.zeros_like(position) + n_keys
    else:
        exists = (position >= 0) & (position < n_keys)
        pointer = bounds + b.to(tl.int64) * 2 * n_keys + position
        begin = tl.load(pointer, mask=exists, other=n_keys)
        end = tl.load(pointer + n_keys, mask=exists, other=0)
        return begin, end


@triton.jit
def visible_keys(bounds, b, i, n_keys, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that a block of queries at positions i (BLOCK_M,) sees.

    Returns (first, last, begin, mask_from, end). Query i sees the keys first <= j < last; both are
    (BLOCK_M,). The loop over blocks of keys goes from `begin` to `end`. Before `mask_from` every
    query sees every key, so only later blocks need a mask.
    """
    first, last = document_of(bounds, b, i, n_keys)
    if CAUSAL:
        last = tl.minimum(last, i + 1)
    begin = tl.min(first) // BLOCK_N * BLOCK_N
    mask_from = tl.maximum(tl.min(last), 0) // BLOCK_N * BLOCK_N if bounds is None else begin
    return first, last, begin, mask_from, tl.maximum(tl.max(last), 0)


# --- the kernels
#
# Index names: `query` counts queries from 0, `i` is a query's position in the sequence of keys
# (queries are its last positions), `j` is a key's position. Suffix `_block`: rows (`load_rows`).
#
# A mask costs time only in the blocks that need one. The first two kernels have a loop without it;
# `dkdv_kernel` has a branch, because a second loop would cost registers that its two accumulators
# need. Where the branch spills registers, too (heads of two widths, small blocks), it masks all.


@triton.jit
def forward_kernel(
    q, k, v, out, lse, slopes, bounds,
    q_strides, k_strides, v_strides, out_strides, n_queries, n_keys, scale, softcap,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out and lse of BLOCK_M queries. Grid: (blocks of queries, heads, batch)."""
    # The last queries see most keys, so they start first.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    h, b = tl.program_id(1), tl.program_id(2)
    query = start + tl.arange(0, BLOCK_M)
    i = query + n_keys - n_queries
    origin = start + n_keys - n_queries
    slope = 0.0 if slopes is None else tl.load(slopes + h) * LOG2E
    first, last, begin, mask_from, end = visible_keys(bounds, b, i, n_keys, CAUSAL, BLOCK_N)

    q_block = load_rows(q, q_strides, b, h, start, n_queries, BLOCK_M, D, LOW, HIGH)
    o = zeros(BLOCK_M, LOW, HIGH)
    m = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, so that -inf - m is never NaN
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    # One source for two loops: over blocks that all queries see, then over those that need a mask.
    for masked in tl.static_range(2):
        for at in range(mask_from if masked else begin, end if masked else mask_from, BLOCK_N):
            j = at + tl.arange(0, BLOCK_N)
            k_block = load_rows(k, k_strides, b, h // GROUP, at, n_keys, BLOCK_N, D, LOW, HIGH)
            s, _ = capped(rows_dot_rows(q_block, k_block) * scale, softcap)
            if slopes is not None:
                s += alibi(i[:, None], j[None, :], origin, slope, CAUSAL)
            if masked:
                visible = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
                s = tl.where(visible, s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            shrink = tl.exp2(m - m_new)
            l = l * shrink + tl.sum(p, 1)  # noqa: E741
            v_block = load_rows(v, v_strides, b, h // GROUP, at, n_keys, BLOCK_N, D, LOW, HIGH)
            o = add_product(o, shrink[:, None], p, v_block)
            m = m_new

    # A row that sees no key gets out = 0, and lse = inf, which gives P = 0 in the backward.
    seen = l > 0
    factor = tl.where(seen, 1 / tl.where(seen, l, 1), 0)[:, None]
    store_rows(out, out_strides, b, h, start, n_queries, o, factor, BLOCK_M, D, LOW, HIGH)
    row_lse = m + tl.log2(tl.where(seen, l, 1)) - row_bias(i, origin, slope, CAUSAL)
    row = (b * tl.num_programs(1) + h).to(tl.int64) * n_queries + query
    tl.store(lse + row, tl.where(seen, row_lse, float("inf")), mask=query < n_queries)


@triton.jit
def dq_kernel(
    q, k, v, out, do, lse, delta, dq, slopes, bounds,
    q_strides, k_strides, v_strides, out_strides, do_strides, dq_strides,
    n_queries, n_keys, scale, softcap,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq and delta of BLOCK_M queries. Grid: (blocks of queries, heads, batch).

    The loops over keys are those of the forward.
    """
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    h, b = tl.program_id(1), tl.program_id(2)
    query = start + tl.arange(0, BLOCK_M)
    i = query + n_keys - n_queries
    origin = start + n_keys - n_queries
    slope = 0.0 if slopes is None else tl.load(slopes + h) * LOG2E
    first, last, begin, mask_from, end = visible_keys(bounds, b, i, n_keys, CAUSAL, BLOCK_N)

    q_block = load_rows(q, q_strides, b, h, start, n_queries, BLOCK_M, D, LOW, HIGH)
    out_block = load_rows(out, out_strides, b, h, start, n_queries, BLOCK_M, D, LOW, HIGH)
    do_block = load_rows(do, do_strides, b, h, start, n_queries, BLOCK_M, D, LOW, HIGH)
    row_delta = tl.sum(out_block[0].to(tl.float32) * do_block[0].to(tl.float32), 1)
    if HIGH > 0:
        row_delta += tl.sum(out_block[1].to(tl.float32) * do_block[1].to(tl.float32), 1)
    row = (b * tl.num_programs(1) + h).to(tl.int64) * n_queries + query
    tl.store(delta + row, row_delta, mask=query < n_queries)
    row_lse = tl.load(lse + row, mask=query < n_queries, other=float("inf"))
    row_lse += row_bias(i, origin, slope, CAUSAL)

    total_dq = zeros(BLOCK_M, LOW, HIGH)
    for masked in tl.static_range(2):
        for at in range(mask_from if masked else begin, end if masked else mask_from, BLOCK_N):
            j = at + tl.arange(0, BLOCK_N)
            k_block = load_rows(k, k_strides, b, h // GROUP, at, n_keys, BLOCK_N, D, LOW, HIGH)
            v_block = load_rows(v, v_strides, b, h // GROUP, at, n_keys, BLOCK_N, D, LOW, HIGH)
            s, cap_slope = capped(rows_dot_rows(q_block, k_block) * scale, softcap)
            if slopes is not None:
                s += alibi(i[:, None], j[None, :], origin, slope, CAUSAL)
            if masked:
                visible = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
                s = tl.where(visible, s, -float("inf"))
            p = tl.exp2(s - row_lse[:, None])
            dp = rows_dot_rows(do_block, v_block)
            ds = p * (dp - row_delta[:, None]) * cap_slope
            total_dq = add_product(total_dq, 1.0, ds, k_block)
    factor = scale / LOG2E  # the kernels' scale carries log2(e), a gradient does not
    store_rows(dq, dq_strides, b, h, start, n_queries, total_dq, factor, BLOCK_M, D, LOW, HIGH)


@triton.jit
def dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, slopes, bounds,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    n_queries, n_keys, scale, softcap,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys, over all query heads that share them.

    Grid: (blocks of keys, key heads, batch). Scores are transposed, (BLOCK_N, BLOCK_M), so that P^T
    and dS^T are ready to multiply do and q.
    """
    start = tl.program_id(0) * BLOCK_N  # the first keys have the most queries, so they start first
    kh, b = tl.program_id(1), tl.program_id(2)
    past = n_keys - n_queries  # the position of query 0
    j = start + tl.arange(0, BLOCK_N)
    first, last = document_of(bounds, b, j, n_keys)  # queries at first <= i < last see key j
    if CAUSAL:
        first = tl.maximum(first, j)
    elif bounds is None:
        first += past
    begin = tl.maximum(tl.min(first) - past, 0) // BLOCK_M * BLOCK_M
    end = tl.minimum(tl.max(last) - past, n_queries)
    MASK_ALL: tl.constexpr = bounds is not None or (CAUSAL and (HIGH > 0 or BLOCK_N < 64))
    mask_until = tl.max(first) - past  # from here on, queries see every key of the block

    k_block = load_rows(k, k_strides, b, kh, start, n_keys, BLOCK_N, D, LOW, HIGH)
    v_block = load_rows(v, v_strides, b, kh, start, n_keys, BLOCK_N, D, LOW, HIGH)
    total_dk = zeros(BLOCK_N, LOW, HIGH)
    total_dv = zeros(BLOCK_N, LOW, HIGH)
    for member in range(GROUP):
        h = kh * GROUP + member
        slope = 0.0 if slopes is None else tl.load(slopes + h) * LOG2E
        head_row = (b * tl.num_programs(1) * GROUP + h).to(tl.int64) * n_queries
        for at in range(begin, end, BLOCK_M):
            query = at + tl.arange(0, BLOCK_M)
            i = query + past
            q_block = load_rows(q, q_strides, b, h, at, n_queries, BLOCK_M, D, LOW, HIGH)
            s, cap_slope = capped(rows_dot_rows(k_block, q_block) * scale, softcap)
            if slopes is not None:
                s += alibi(i[None, :], j[:, None], start, slope, CAUSAL)
            if MASK_ALL:
                s = tl.where(i[None, :] >= first[:, None], s, -float("inf"))
            if bounds is not None:
                s = tl.where(i[None, :] < last[:, None], s, -float("inf"))
            row_lse = tl.load(lse + head_row + query, mask=query < n_queries, other=float("inf"))
            p = tl.exp2(s - (row_lse + row_bias(i, start, slope, CAUSAL))[None, :])
            if CAUSAL and not MASK_ALL:  # noqa: SIM102 (known at compile time; the next is not)
                if at < mask_until:  # the diagonal crosses this block of scores
                    p = tl.where(i[None, :] >= first[:, None], p, 0.0)
            do_block = load_rows(do, do_strides, b, h, at, n_queries, BLOCK_M, D, LOW, HIGH)
            row_delta = tl.load(delta + head_row + query, mask=query < n_queries, other=0.0)
            dp = rows_dot_rows(v_block, do_block)
            ds = p * (dp - row_delta[None, :]) * cap_slope
            total_dv = add_product(total_dv, 1.0, p, do_block)
            total_dk = add_product(total_dk, 1.0, ds, q_block)
    factor = scale / LOG2E  # as for dq
    store_rows(dk, dk_strides, b, kh, start, n_keys, total_dk, factor, BLOCK_N, D, LOW, HIGH)
    store_rows(dv, dv_strides, b, kh, start, n_keys, total_dv, 1.0, BLOCK_N, D, LOW, HIGH)


# --- launching the kernels

KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}  # by the pass they do


def split(head_dim: int) -> tuple[int, int]:
    """(LOW, HIGH), powers of two: the widths that hold a head with the least waste.

    LOW is at least 16; HIGH is 0 or at least 16.
    """
    low = max(16, 1 << (head_dim.bit_length() - 1))
    high = max(16, triton.next_power_of_2(head_dim - low)) if head_dim > low else 0
    return (low, high) if high < low else (2 * low, 0)


def launch(
    pass_name: str,
    tensors: dict,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    row: tuple | None = None,
) -> None:
    """Run the kernel of one pass ("forward", "dq" or "dkdv") over all blocks, heads and sequences.

    tensors: the kernel's pointers by the names of its arguments, some of them None. row: launch
    settings, or None for those of the table.
    """
    kernel = KERNELS[pass_name]
    q, k = tensors["q"], tensors["k"]
    B, H, n_queries, D = q.shape
    Hkv, n_keys = k.shape[1:3]
    arch = architecture(q.device)
    row = row or launch_table.row_for(arch, D, pass_name, q.dtype, n_queries)
    options = launch_table.options(row)
    if pass_name == "dkdv":
        grid = (triton.cdiv(n_keys, options["BLOCK_N"]), Hkv, B)
    else:
        grid = (triton.cdiv(n_queries, options["BLOCK_M"]), H, B)
    strides = {
        f"{name}_strides": x.stride()[:3]
        for name, x in tensors.items()
        if x is not None and x.ndim == 4
    }
    sizes = {"n_queries": n_queries, "n_keys": n_keys, "scale": scale * LOG2E.value}
    sizes["softcap"] = None if softcap is None else softcap * LOG2E.value
    low, high = split(D)
    constants = {"GROUP": H // Hkv, "CAUSAL": causal, "D": D, "LOW": low, "HIGH": high}
    if grid[0] > 0 and B > 0:
        with torch.cuda.device_of(q):
            kernel[grid](**tensors, **strides, **sizes, **constants, **options)


# --- the operator
#
# A custom operator is one node for torch.compile, activation checkpointing and FlopCounterMode.


def like_rows(x):
    """An uninitialized tensor of x's shape (B, H, T, D), laid out in memory as (B, T, H, D).

    So joining the heads, (B, T, H * D), needs no copy.
    """
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


@torch.library.custom_op("mpt::flash_attention", mutates_args=())
def forward_operator(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, bounds: Tensor | None,
    causal: bool, scale: float, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse): out shaped like q, lse (B, H, Tq) fp32, a logarithm to base 2."""
    out = like_rows(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "slopes": slopes, "bounds": bounds}
    launch("forward", tensors, causal, scale, softcap)
    return out, lse


def heads_of(qkv, n_heads: int, n_kv_heads: int):
    """The views q (B, H, T, D), k and v (B, Hkv, T, D) of qkv, (B, T, (H + 2 Hkv) * D).

    That is the output of the model's fused projection, Wqkv.
    """
    heads = qkv.unflatten(-1, (n_heads + 2 * n_kv_heads, -1)).transpose(1, 2)
    return heads.split([n_heads, n_kv_heads, n_kv_heads], dim=1)


def room_for_gradients(q, k):
    """An uninitialized (B, T, (H + 2 Hkv) * D); T is the larger of Tq and Tk."""
    B, H, n_queries, D = q.shape
    Hkv, n_keys = k.shape[1:3]
    return q.new_empty(B, max(n_queries, n_keys), (H + 2 * Hkv) * D)


def gradients_in(dqkv, q, k):
    """The views dq, dk, dv of dqkv, shaped like q, k and k."""
    dq, dk, dv = heads_of(dqkv, q.shape[1], k.shape[1])
    return dq[:, :, : q.shape[2]], dk[:, :, : k.shape[2]], dv[:, :, : k.shape[2]]


@torch.library.custom_op("mpt::flash_attention_backward", mutates_args=())
def backward_operator(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, slopes: Tensor | None,
    bounds: Tensor | None, causal: bool, scale: float, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """dq, dk and dv side by side in one tensor, (B, T, (H + 2 Hkv) * D): `gradients_in` splits it.

    So it is the gradient of the fused projection's output. If Tq and Tk differ, rows beyond the
    shorter one's last are not set. `dq_kernel` computes delta, which `dkdv_kernel` reads.
    """
    dqkv = room_for_gradients(q, k)
    dq, dk, dv = gradients_in(dqkv, q, k)
    delta = torch.empty_like(lse)
    do = do if do.stride(-1) == 1 else do.contiguous()
    tensors = {"q": q, "k": k, "v": v, "do": do, "lse": lse, "delta": delta}
    tensors |= {"slopes": slopes, "bounds": bounds}
    launch("dq", tensors | {"out": out, "dq": dq}, causal, scale, softcap)
    launch("dkdv", tensors | {"dk": dk, "dv": dv}, causal, scale, softcap)
    return dqkv


@forward_operator.register_fake
def forward_shapes(q, k, v, slopes, bounds, causal, scale, softcap=None):
    """Shapes, dtypes and strides of `forward_operator`'s results, for the compiler."""
    return like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@backward_operator.register_fake
def backward_shapes(do, q, k, v, out, lse, slopes, bounds, causal, scale, softcap=None):
    """The same for `backward_operator`."""
    return room_for_gradients(q, k)


def keep_for_backward(ctx, inputs, output):
    """Save what `gradients` needs."""
    *tensors, causal, scale, softcap = inputs
    ctx.settings = causal, scale, softcap
    ctx.save_for_backward(*tensors, *output)


@functools.partial(forward_operator.register_autograd, setup_context=keep_for_backward)
def gradients(ctx, do, _):
    """The gradients of `forward_operator`'s inputs: dq, dk, dv, and none for the other five."""
    q, k, v, slopes, bounds, out, lse = ctx.saved_tensors
    dqkv = backward_operator(do, q, k, v, out, lse, slopes, bounds, *ctx.settings)
    return *gradients_in(dqkv, q, k), None, None, None, None, None


class FromProjection(torch.autograd.Function):
    """Attention as a function of qkv (B, T, (H + 2 Hkv) * D), the fused projection's output.

    It runs the same operators. But with q, k and v as the inputs, autograd would copy dq, dk and dv
    into one tensor, the gradient of qkv. Here `backward_operator` has made that tensor already.
    """

    @staticmethod
    def forward(ctx, qkv, n_heads, n_kv_heads, slopes, bounds, causal, scale, softcap):
        """out, (B, H, T, D)."""
        q, k, v = heads_of(qkv, n_heads, n_kv_heads)
        out, lse = forward_operator(q, k, v, slopes, bounds, causal, scale, softcap)
        ctx.save_for_backward(qkv, slopes, bounds, out, lse)
        ctx.heads = n_heads, n_kv_heads
        ctx.settings = causal, scale, softcap
        return out

    @staticmethod
    def backward(ctx, do):
        """dqkv, and no gradient for the other inputs."""
        qkv, slopes, bounds, out, lse = ctx.saved_tensors
        q, k, v = heads_of(qkv, *ctx.heads)
        dqkv = backward_operator(do, q, k, v, out, lse, slopes, bounds, *ctx.settings)
        return dqkv, None, None, None, None, None, None, None


@register_flop_formula(torch.ops.mpt.flash_attention)
def forward_flops(q_shape, k_shape, *args, **kwargs) -> int:
    """Two matmuls with full score matrices.

    Like PyTorch's own formula, it also counts the pairs that the causal mask hides.
    """
    B, H, n_queries, D = q_shape
    return 2 * 2 * B * H * n_queries * k_shape[2] * D


@register_flop_formula(torch.ops.mpt.flash_attention_backward)
def backward_flops(do_shape, q_shape, k_shape, *args, **kwargs) -> int:
    """Five matmuls, as in PyTorch's own formula; these kernels do seven."""
    return forward_flops(q_shape, k_shape) * 5 // 2


def flash_attention(
    q,
    k,
    v,
    *,
    alibi_slopes=None,
    causal=True,
    softmax_scale=None,
    sequence_ids=None,
    window=None,
    softcap=None,
    qkv=None,
):
    """softmax(q k^T * softmax_scale + bias) v without a T x T tensor: (B, H, Tq, D).

    q: (B, H, Tq, D); k, v: (B, Hkv, Tk, D), H a multiple of Hkv, D at most 128; any strides; bf16,
    fp16 or fp32 (under autocast: its dtype). The queries are the last Tq of the Tk positions.
    alibi_slopes: (H,) fp32, without gradient. softmax_scale: None means 1 / sqrt(D). sequence_ids:
    (B, Tk) integers. A document is a run of equal ids, and documents do not see each other. A query
    that sees no key gives zeros. window: how many keys before its own a query sees, with causality.
    softcap: c * tanh(score / c) is the score before the bias.
    qkv: the projection's output, (B, T, (H + 2 Hkv) * D), all of q, then k, then v; or None. If q,
    k and v are still views of it, not computed anew as by RoPE, its gradient is made in one piece.
    Differentiable once. Raises UserError, a ValueError.
    """
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    check(q, k, v, alibi_slopes, sequence_ids)
    if qkv is not None and not are_heads_of(qkv, q, k, v):
        qkv = None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    bounds = None if sequence_ids is None else document_bounds(sequence_ids)
    if window is not None:
        require(causal, "flash_attention has a window only with causal=True")
        bounds = window_bounds(bounds, window, k)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    rest = slopes, bounds, causal, scale, softcap
    if qkv is not None:
        return FromProjection.apply(qkv, q.shape[1], k.shape[1], *rest)
    out, _ = forward_operator(q, k, v, *rest)
    return out


def check(q, k, v, slopes, sequence_ids) -> None:
    """UserError for inputs that the kernels cannot take."""
    problem = fault_of_tensors(q, k, v) or fault_of_bias(q, k, slopes, sequence_ids)
    if problem:
        raise UserError(problem)


# Messages are formatted only on failure, because these two run in every step.


def fault_of_tensors(q, k, v) -> str:
    """What the kernels cannot take of q, k and v; "" if nothing."""
    is_4d = q.ndim == k.ndim == 4 and k.shape == v.shape
    if not is_4d or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        return f"flash_attention needs q (B, H, Tq, D) and k, v (B, Hkv, Tk, D), not {shapes}"

    H, Hkv, D = q.shape[1], k.shape[1], q.shape[3]
    if Hkv == 0 or H % Hkv > 0:
        return f"flash_attention: {H} query heads are not a multiple of {Hkv} key heads"
    if D > 128:
        fix = "use attn_impl=sdpa, or more heads"
        return f"flash_attention takes head dims up to 128, not {D}: {fix}"

    supported = q.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if not supported or not q.dtype == k.dtype == v.dtype:
        dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
        return f"flash_attention needs q, k, v all bf16, fp16 or fp32, not {dtypes}: cast them"
    if q.device.type != "cuda" and not INTERPRETED.value:
        fix = "use attn_impl=sdpa or blocks, or set TRITON_INTERPRET=1 to run it, very slowly"
        return f"flash_attention runs on CUDA and ROCm GPUs, not on {q.device.type}: {fix}"
    if not q.device == k.device == v.device:
        return f"q, k, v are on {q.device}, {k.device}, {v.device}: move them to one device"
    return ""


def fault_of_bias(q, k, slopes, sequence_ids) -> str:
    """The same for slopes (H,) fp32 without gradient, and ids (B, Tk) with Tq <= Tk."""
    H, n_queries = q.shape[1:3]
    B, n_keys = k.shape[0], k.shape[2]
    if slopes is not None:
        right_kind = slopes.dtype == torch.float32 and slopes.device == q.device
        if slopes.shape != (H,) or not right_kind:
            given = f"{tuple(slopes.shape)} {slopes.dtype} on {slopes.device}"
            fix = "attention.alibi_slopes(n_heads, device=...) makes them"
            return f"alibi_slopes must be ({H},) fp32 on {q.device}, not {given}: {fix}"
        if slopes.requires_grad:
            return "alibi_slopes get no gradient here: detach them, or use attn_impl=reference"

    if sequence_ids is not None:
        are_integers = not sequence_ids.is_floating_point() and sequence_ids.device == q.device
        if sequence_ids.shape != (B, n_keys) or not are_integers or n_queries > n_keys:
            given = f"{tuple(sequence_ids.shape)} {sequence_ids.dtype} on {sequence_ids.device}"
            needed = f"integers ({B}, {n_keys}) on {q.device}, with no more queries than keys"
            return f"sequence_ids must be {needed}, not {given} with {n_queries} queries"
    return ""


def are_heads_of(qkv, q, k, v) -> bool:
    """Whether q, k and v are views of qkv, laid out as `heads_of` makes them.

    Their order is the caller's: torch.compile cannot trace where in the memory a view begins.
    """
    memory = qkv if qkv._base is None else qkv._base
    for x, view in zip((q, k, v), heads_of(qkv, q.shape[1], k.shape[1]), strict=True):
        if x._base is not memory or x.shape != view.shape or x.stride() != view.stride():
            return False
    return True


def document_bounds(sequence_ids):
    """(B, T) ids -> (B, 2, T) int32: where each position's document begins and ends (exclusive)."""
    T = sequence_ids.shape[1]
    position = torch.arange(T, device=sequence_ids.device)
    edge = torch.ones_like(sequence_ids[:, :1], dtype=torch.bool)
    change = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    is_first = torch.cat([edge, change], 1)
    is_last = torch.cat([change, edge], 1)
    begin = torch.where(is_first, position, 0).cummax(1).values
    end = torch.where(is_last, position + 1, T).flip(1).cummin(1).values.flip(1)
    return torch.stack([begin, end], 1).to(torch.int32)


def window_bounds(bounds, window: int, k):
    """`document_bounds`, or None, within a window: (B, 2, Tk) int32.

    A query sees `window` keys before its own, and a key is seen by as many queries after it.
    """
    B, n_keys = k.shape[0], k.shape[2]
    position = torch.arange(n_keys, device=k.device, dtype=torch.int32)
    first = (position - window).clamp(min=0)
    last = (position + window + 1).clamp(max=n_keys)
    if bounds is None:
        return torch.stack([first, last]).expand(B, 2, n_keys).contiguous()
    return torch.stack([bounds[:, 0].maximum(first), bounds[:, 1].minimum(last)], 1)


# --- the obvious version, and measurements


def reference_attention(
    q,
    k,
    v,
    alibi_slopes=None,
    causal=True,
    softmax_scale=None,
    sequence_ids=None,
    window=None,
    softcap=None,
):
    """What `flash_attention` computes, with all scores in memory. Arguments as there."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    n_queries, n_keys = q.shape[2], k.shape[2]
    i = torch.arange(n_keys - n_queries, n_keys, device=q.device)[:, None]  # (Tq, 1)
    j = torch.arange(n_keys, device=q.device)  # (Tk,)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    s = q @ k.transpose(-2, -1) * scale  # (B, H, Tq, Tk)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None].to(s.dtype) * (i - j).abs()

    visible = j <= i if causal else torch.ones_like(j <= i)  # (Tq, Tk)
    if window is not None:
        visible = visible & (i - j <= window)
    if sequence_ids is not None:
        document = F.pad((sequence_ids[:, 1:] != sequence_ids[:, :-1]).cumsum(1), (1, 0))  # (B, Tk)
        same_document = document[:, n_keys - n_queries :, None] == document[:, None, :]
        visible = visible & same_document[:, None]  # (B, 1, Tq, Tk)
    sees_no_key = ~visible.any(-1, keepdim=True)
    s = s.masked_fill(~visible, -math.inf).masked_fill(sees_no_key, 0)
    p = torch.softmax(s, dim=-1).masked_fill(sees_no_key, 0)
    return p @ v


def compare(
    device,
    dtype,
    B=1,
    H=2,
    Hkv=1,
    n_queries=80,
    n_keys=80,
    D=64,
    alibi=True,
    documents=False,
    causal=True,
    window=None,
    softcap=None,
):
    """The largest errors of out, dq, dk, dv against float64, relative to the largest exact one."""
    torch.manual_seed(0)
    shapes = [(B, n_queries, H, D), (B, n_keys, Hkv, D), (B, n_keys, Hkv, D), (B, n_queries, H, D)]
    q, k, v, do = (torch.randn(shape, device=device).to(dtype).transpose(1, 2) for shape in shapes)
    slopes, ids = None, None
    if alibi:
        slopes = torch.exp2(-8 / H * torch.arange(1.0, H + 1, device=device))
    if documents:
        ids = torch.arange(n_keys, device=device).expand(B, -1) // (n_keys // 3 + 1)

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    rule = {"causal": causal, "sequence_ids": ids, "window": window, "softcap": softcap}
    out = flash_attention(*leaves, alibi_slopes=slopes, **rule)
    ours = [out, *torch.autograd.grad(out, leaves, do)]
    exact_leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact_out = reference_attention(*exact_leaves, slopes, **rule)
    exact = [exact_out, *torch.autograd.grad(exact_out, exact_leaves, do.double())]
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, exact, strict=True)]


def demonstrate(device) -> None:
    """Print errors against float64; UserError if one is too large."""
    n = 48 if INTERPRETED.value else 1000
    cases = [
        {},
        {"alibi": False},
        {"causal": False},
        {"documents": True},
        {"window": 20},
        {"softcap": 2.0},
        {"D": 96},
        {"D": 128, "Hkv": 2},
    ]
    print(f"largest relative error of   out       dq       dk       dv    ({device}, {n} tokens)")
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        for case in cases:
            errors = compare(device, dtype, n_queries=n, n_keys=n, **case)
            print(f"{str(dtype)[6:]:9s} {str(case or ''):20s}", *(f"{e:.1e} " for e in errors))
            require(
                all(error < limit for error in errors),
                f"flash_attention is wrong in {dtype} {case}: errors {errors}",
            )


# The head dims that each flag times. One of them alone may take minutes.
TUNED = {"--tune": (64, 128), "--tune=64": (64,), "--tune=128": (128,)}


def tune(device, head_dims: tuple[int, ...] = (64, 128), T: int = 4096, H: int = 16) -> None:
    """Print the fastest row of each pass on this GPU, to paste into ROWS (launch_table.py).

    Measured on causal bf16 attention with ALiBi, 4 sequences of T tokens, H heads.
    """
    for D in head_dims:
        q, k, v, do = (
            torch.randn(4, T, H, D, device=device).bfloat16().transpose(1, 2) for _ in range(4)
        )
        slopes = torch.exp2(-8 / H * torch.arange(1.0, H + 1, device=device))
        scale = D**-0.5
        out, lse = forward_operator(q, k, v, slopes, None, True, scale)
        tensors = {"q": q, "k": k, "v": v, "slopes": slopes, "bounds": None}
        tensors |= {"out": out, "lse": lse, "do": do, "delta": torch.empty_like(lse)}
        dq, dk, dv = gradients_in(room_for_gradients(q, k), q, k)
        tensors |= {"dq": dq, "dk": dk, "dv": dv}
        rows = []
        for pass_name, kernel in KERNELS.items():
            pointers = {name: x for name, x in tensors.items() if name in kernel.arg_names}
            run_pass = functools.partial(launch, pass_name, pointers, True, scale, None)
            label = f"{pass_name}, heads of {D}"
            rows.append(launch_table.fastest(label, run_pass, triton.testing.do_bench))
        print(f'    ("{architecture(q.device)}", {D}, {", ".join(map(str, rows))}),', flush=True)


def main(argv) -> None:
    """Compare with float64, in the interpreter if there is no GPU; --tune: time launch settings."""
    if program.wants_help(argv):
        program.show_help()
    usage = "usage: python -m fast.flash_attention [--tune | --tune=64 | --tune=128]"
    require(not argv or (len(argv) == 1 and argv[0] in TUNED), usage)
    has_gpu = torch.cuda.is_available()
    require(has_gpu or not argv, "--tune times kernels on a GPU, and there is none here")
    if not has_gpu and not INTERPRETED.value:
        # Triton reads the variable when a kernel is decorated, so the program starts again.
        restart = [sys.executable, "-m", "fast.flash_attention"]
        os.execve(sys.executable, restart, os.environ | {"TRITON_INTERPRET": "1"})
    if argv:
        return tune(torch.device("cuda"), TUNED[argv[0]])
    demonstrate("cuda" if has_gpu else "cpu")


if __name__ == "__main__":
    program.run(main)

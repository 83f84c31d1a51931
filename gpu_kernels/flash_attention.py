"""FlashAttention-2 with ALiBi in Triton, forward and backward: one source for NVIDIA and AMD GPUs.

Attention is out = softmax(S) v with S = q k^T * scale + bias. S has Tq x Tk elements and is never stored: a program
owns a block of queries, walks over the keys block by block, and keeps three running values for each of its rows:

    m   the largest score so far        m' = max(m, rowmax(S_block))
    l   the sum of exp(score - m)       l' = l * exp(m - m') + rowsum(P),  P = exp(S_block - m')
    o   the unnormalised output         o' = o * exp(m - m') + P v_block

At the end out = o / l. This online softmax is exact: the factor exp(m - m') moves what was summed to the new maximum.
Kept for the backward: out and lse = m + log l, one number a row, from which P = exp(S - lse) comes back in one step.
The kernels count in powers of two (exp2 is one instruction), so scale and slopes carry a factor log2(e), and lse is
a base-2 logarithm.

The backward, with do the gradient of out and delta = rowsum(do * out), which equals rowsum(P * dP):

    dP = do v^T        dS = P * (dP - delta)        dv = P^T do        dq = dS k * scale        dk = dS^T q * scale

dq sums over keys; dk and dv sum over queries, and over the query heads that share a key head. One program could form
both, but then many programs would add to one dq with atomics, in an order that changes from run to run. Here there are
two kernels: one owns a block of queries and makes dq (and delta), the other owns a block of keys and makes dk and dv.
S and dP are computed twice, seven matmuls instead of five, and every sum has one owner and one order: two runs are
equal to the bit.

ALiBi adds -slope * (i - j) to the score of query i and key j <= i. The part that depends on i is constant in a row and
leaves the softmax alone, so a program adds only slope * (j - origin), a vector over its keys, and puts slope *
(i - origin) right in lse. `origin` is the program's first row (or key): numbers stay small there, where fp32 is
precise. Slopes are fp32. Without causality the bias is -slope * |i - j|, element by element.

What a query may see is one interval of keys [first, last): causality sets its end, a packed document both ends, ragged
lengths the end of everything. Blocks outside are skipped; in the forward and for dq, blocks that lie inside for every
row need no mask, unless there are documents.

NVIDIA and AMD run the same source. What differs: a wavefront is 64 threads wide and a compute unit of an MI250 or MI300
has 64 KiB of shared memory (LDS) where an H100 has 227, so AMD's blocks are smaller and mostly one stage deep;
`waves_per_eu` exists there only. All of it is data, in gpu_kernels/launch_table.py.

    python -m gpu_kernels.flash_attention           compare with float64; on a GPU also a table of speeds
    python -m gpu_kernels.flash_attention --tune    time launch settings, print rows for launch_table.py

Without a GPU the comparison runs in Triton's interpreter.

Dao, FlashAttention-2 (2023), algorithms 1 and 2; Press et al., ALiBi (2021), section 3.
Read next: gpu_kernels/launch_table.py.
"""

import functools
import math
import os
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import config
from config import UserError, require
from gpu_kernels import launch_table
from gpu_kernels.launch_table import architecture

try:
    import triton
    import triton.language as tl
except ImportError as missing:
    raise ImportError(
        "gpu_kernels/flash_attention.py needs triton: torch for CUDA and ROCm brings it; "
        "on a Linux CPU: pip install 'triton>=3.4'"
    ) from missing

LOG2E = tl.constexpr(math.log2(math.e))
INTERPRETED = tl.constexpr(
    bool(triton.knobs.runtime.interpret)
)  # TRITON_INTERPRET=1: kernels run in NumPy


# --- pieces of a kernel


@triton.jit
def part(
    x,
    strides,
    b,
    h,
    start,
    n,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):
    """Pointers to columns FIRST .. FIRST + WIDTH of rows start .. start + BLOCK of a head, and which of them exist."""
    row = (
        b.to(tl.int64) * strides[0]
        + h.to(tl.int64) * strides[1]
        + tl.cast(start, tl.int64) * strides[2]
    )
    i, d = tl.arange(0, BLOCK), FIRST + tl.arange(0, WIDTH)
    there = (i < n - start)[:, None]
    if FIRST + WIDTH > D:
        there = there & (d < D)[None, :]
    return x + row + i[:, None] * strides[2] + d[None, :], there


@triton.jit
def load_rows(
    x,
    strides,
    b,
    h,
    start,
    n,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Rows start .. start + BLOCK of one head of n rows, zeros behind them. Widths are powers of two, so a head of 96
    is two tensors, (BLOCK, 64) and (BLOCK, 32), and not one of 128; a head of 64 or 128 is one."""
    pointers, there = part(x, strides, b, h, start, n, BLOCK, 0, LOW, D)
    low = tl.load(pointers, mask=there, other=0.0)
    if HIGH == 0:
        return (low,)
    else:
        pointers, there = part(x, strides, b, h, start, n, BLOCK, LOW, HIGH, D)
        return (low, tl.load(pointers, mask=there, other=0.0))


@triton.jit
def store_rows(
    x, strides, b, h, start, n, rows, factor,
    BLOCK: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Write rows * factor where `load_rows` reads."""
    pointers, there = part(x, strides, b, h, start, n, BLOCK, 0, LOW, D)
    tl.store(pointers, (rows[0] * factor).to(x.dtype.element_ty), mask=there)
    if HIGH > 0:
        pointers, there = part(x, strides, b, h, start, n, BLOCK, LOW, HIGH, D)
        tl.store(pointers, (rows[1] * factor).to(x.dtype.element_ty), mask=there)


@triton.jit
def zeros(BLOCK: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    if HIGH == 0:
        return (tl.zeros([BLOCK, LOW], tl.float32),)
    else:
        return (tl.zeros([BLOCK, LOW], tl.float32), tl.zeros([BLOCK, HIGH], tl.float32))


@triton.jit
def dot(a, b, total=None):
    """a @ b + total in fp32. ieee: fp32 inputs are not rounded to tf32, which one vendor has and the other has not."""
    if INTERPRETED:  # where bf16 dots multiply raw bits
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
def add_product(total, keep, p, rows):
    """total * keep + p rows: (M, D), (M, N), (N, D) -> (M, D), with p rounded to the rows' dtype."""
    p = p.to(rows[0].dtype)
    if len(rows) == 1:
        return (dot(p, rows[0], total[0] * keep),)
    else:
        return (dot(p, rows[0], total[0] * keep), dot(p, rows[1], total[1] * keep))


@triton.jit
def alibi(i, j, origin, slope, CAUSAL: tl.constexpr):
    """The bias of queries i and keys j, which broadcast; if causal, less what is constant in a row: see `row_bias`."""
    if CAUSAL:
        return slope * (j - origin).to(tl.float32)
    else:
        return -slope * tl.abs(i - j).to(tl.float32)


@triton.jit
def row_bias(i, origin, slope, CAUSAL: tl.constexpr):
    """What `alibi` leaves out of row i: taken from the lse that is stored, added again when P is made from it."""
    return slope * (i - origin).to(tl.float32) * CAUSAL


@triton.jit
def document_of(bounds, b, position, n_keys):
    """Where the document of each position begins and ends. Without documents all is one."""
    if bounds is None:
        return tl.zeros_like(position), tl.zeros_like(position) + n_keys
    else:
        there = (position >= 0) & (position < n_keys)
        begin = bounds + b.to(tl.int64) * 2 * n_keys + position
        return tl.load(begin, mask=there, other=n_keys), tl.load(
            begin + n_keys, mask=there, other=0
        )


@triton.jit
def visible_keys(bounds, b, i, n_keys, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """A query at position i sees the keys first .. last; all queries of a program see what lies before `whole`, some
    see what lies before `end`."""
    first, last = document_of(bounds, b, i, n_keys)
    if CAUSAL:
        last = tl.minimum(last, i + 1)
    begin = tl.min(first) // BLOCK_N * BLOCK_N
    whole = tl.maximum(tl.min(last), 0) // BLOCK_N * BLOCK_N if bounds is None else begin
    return first, last, begin, whole, tl.maximum(tl.max(last), 0)


# --- kernels


@triton.jit
def forward_kernel(
    q, k, v, out, lse, slopes, bounds, q_strides, k_strides, v_strides, out_strides, n_queries, n_keys, scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out and lse of BLOCK_M queries. Grid: (blocks of queries, heads, batch)."""
    start = (
        tl.num_programs(0) - 1 - tl.program_id(0)
    ) * BLOCK_M  # the last rows see most keys: they go first
    h, b = tl.program_id(1), tl.program_id(2)
    query = start + tl.arange(0, BLOCK_M)
    i = query + n_keys - n_queries  # position among the keys
    origin = start + n_keys - n_queries
    slope = 0.0 if slopes is None else tl.load(slopes + h) * LOG2E
    first, last, begin, whole, end = visible_keys(bounds, b, i, n_keys, CAUSAL, BLOCK_N)

    rows = load_rows(q, q_strides, b, h, start, n_queries, BLOCK_M, D, LOW, HIGH)
    o = zeros(BLOCK_M, LOW, HIGH)
    m = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, so that -inf - m is never NaN
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    for masked in tl.static_range(2):
        for at in range(whole if masked else begin, end if masked else whole, BLOCK_N):
            j = at + tl.arange(0, BLOCK_N)
            keys = load_rows(k, k_strides, b, h // GROUP, at, n_keys, BLOCK_N, D, LOW, HIGH)
            s = rows_dot_rows(rows, keys) * scale
            if slopes is not None:
                s += alibi(i[:, None], j[None, :], origin, slope, CAUSAL)
            if masked:
                s = tl.where(
                    (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None]), s, -float("inf")
                )
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            shrink = tl.exp2(m - m_new)
            l = l * shrink + tl.sum(p, 1)  # noqa: E741
            values = load_rows(v, v_strides, b, h // GROUP, at, n_keys, BLOCK_N, D, LOW, HIGH)
            o = add_product(o, shrink[:, None], p, values)
            m = m_new

    seen = l > 0  # a row that sees no key gives zeros, and lse = inf gives it P = 0 in the backward
    store_rows(
        out, out_strides, b, h, start, n_queries, o, tl.where(seen, 1 / tl.where(seen, l, 1), 0)[:, None],
        BLOCK_M, D, LOW, HIGH,
    )  # fmt: skip
    total = m + tl.log2(tl.where(seen, l, 1)) - row_bias(i, origin, slope, CAUSAL)
    row = (b * tl.num_programs(1) + h).to(tl.int64) * n_queries + query
    tl.store(lse + row, tl.where(seen, total, float("inf")), mask=query < n_queries)


@triton.jit
def dq_kernel(
    q, k, v, out, do, lse, delta, dq, slopes, bounds,
    q_strides, k_strides, v_strides, out_strides, do_strides, dq_strides, n_queries, n_keys, scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq and delta of BLOCK_M queries. Grid: (blocks of queries, heads, batch). It walks as the forward does."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    h, b = tl.program_id(1), tl.program_id(2)
    query = start + tl.arange(0, BLOCK_M)
    i = query + n_keys - n_queries
    origin = start + n_keys - n_queries
    slope = 0.0 if slopes is None else tl.load(slopes + h) * LOG2E
    first, last, begin, whole, end = visible_keys(bounds, b, i, n_keys, CAUSAL, BLOCK_N)

    rows = load_rows(q, q_strides, b, h, start, n_queries, BLOCK_M, D, LOW, HIGH)
    outs = load_rows(out, out_strides, b, h, start, n_queries, BLOCK_M, D, LOW, HIGH)
    grads = load_rows(do, do_strides, b, h, start, n_queries, BLOCK_M, D, LOW, HIGH)
    row_delta = tl.sum(outs[0].to(tl.float32) * grads[0].to(tl.float32), 1)
    if HIGH > 0:
        row_delta += tl.sum(outs[1].to(tl.float32) * grads[1].to(tl.float32), 1)
    row = (b * tl.num_programs(1) + h).to(tl.int64) * n_queries + query
    tl.store(delta + row, row_delta, mask=query < n_queries)
    row_lse = tl.load(lse + row, mask=query < n_queries, other=float("inf")) + row_bias(
        i, origin, slope, CAUSAL
    )

    total = zeros(BLOCK_M, LOW, HIGH)
    for masked in tl.static_range(2):
        for at in range(whole if masked else begin, end if masked else whole, BLOCK_N):
            j = at + tl.arange(0, BLOCK_N)
            keys = load_rows(k, k_strides, b, h // GROUP, at, n_keys, BLOCK_N, D, LOW, HIGH)
            values = load_rows(v, v_strides, b, h // GROUP, at, n_keys, BLOCK_N, D, LOW, HIGH)
            s = rows_dot_rows(rows, keys) * scale
            if slopes is not None:
                s += alibi(i[:, None], j[None, :], origin, slope, CAUSAL)
            if masked:
                s = tl.where(
                    (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None]), s, -float("inf")
                )
            p = tl.exp2(s - row_lse[:, None])
            ds = p * (rows_dot_rows(grads, values) - row_delta[:, None])
            total = add_product(total, 1.0, ds, keys)
    factor = scale / LOG2E  # the kernels' scale carries log2(e), a gradient does not
    store_rows(dq, dq_strides, b, h, start, n_queries, total, factor, BLOCK_M, D, LOW, HIGH)


@triton.jit
def dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, slopes, bounds,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, n_queries, n_keys, scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys, over all query heads that share them. Grid: (blocks of keys, key heads, batch).

    Scores are transposed, (BLOCK_N, BLOCK_M), so that P^T and dS^T are ready to multiply do and q. Every block is
    masked: a second loop without the mask would cost registers that the two accumulators need.
    """
    start = tl.program_id(0) * BLOCK_N  # the first keys are seen by most queries: they go first
    kh, b = tl.program_id(1), tl.program_id(2)
    past = n_keys - n_queries  # position of query 0
    j = start + tl.arange(0, BLOCK_N)
    first, last = document_of(bounds, b, j, n_keys)  # of the positions that see a key
    if CAUSAL:
        first = tl.maximum(first, j)
    elif bounds is None:
        first += past
    begin = tl.maximum(tl.min(first) - past, 0) // BLOCK_M * BLOCK_M
    end = tl.minimum(tl.max(last) - past, n_queries)

    keys = load_rows(k, k_strides, b, kh, start, n_keys, BLOCK_N, D, LOW, HIGH)
    values = load_rows(v, v_strides, b, kh, start, n_keys, BLOCK_N, D, LOW, HIGH)
    total_dk = zeros(BLOCK_N, LOW, HIGH)
    total_dv = zeros(BLOCK_N, LOW, HIGH)
    for member in range(GROUP):
        h = kh * GROUP + member
        slope = 0.0 if slopes is None else tl.load(slopes + h) * LOG2E
        head_row = (b * tl.num_programs(1) * GROUP + h).to(tl.int64) * n_queries
        for at in range(begin, end, BLOCK_M):
            query = at + tl.arange(0, BLOCK_M)
            i = query + past
            rows = load_rows(q, q_strides, b, h, at, n_queries, BLOCK_M, D, LOW, HIGH)
            s = rows_dot_rows(keys, rows) * scale
            if slopes is not None:
                s += alibi(i[None, :], j[:, None], start, slope, CAUSAL)
            if CAUSAL or bounds is not None:
                s = tl.where(i[None, :] >= first[:, None], s, -float("inf"))
            if bounds is not None:
                s = tl.where(i[None, :] < last[:, None], s, -float("inf"))
            row_lse = tl.load(lse + head_row + query, mask=query < n_queries, other=float("inf"))
            p = tl.exp2(s - (row_lse + row_bias(i, start, slope, CAUSAL))[None, :])
            grads = load_rows(do, do_strides, b, h, at, n_queries, BLOCK_M, D, LOW, HIGH)
            row_delta = tl.load(delta + head_row + query, mask=query < n_queries, other=0.0)
            ds = p * (rows_dot_rows(values, grads) - row_delta[None, :])
            total_dv = add_product(total_dv, 1.0, p, grads)
            total_dk = add_product(total_dk, 1.0, ds, rows)
    store_rows(dk, dk_strides, b, kh, start, n_keys, total_dk, scale / LOG2E, BLOCK_N, D, LOW, HIGH)
    store_rows(dv, dv_strides, b, kh, start, n_keys, total_dv, 1.0, BLOCK_N, D, LOW, HIGH)


# --- launching them

KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}


def split(head_dim: int) -> tuple[int, int]:
    """Two widths, powers of two from 16 on, that hold a head with the least waste. The second may be 0."""
    low = max(16, 1 << (head_dim.bit_length() - 1))
    high = max(16, triton.next_power_of_2(head_dim - low)) if head_dim > low else 0
    return (low, high) if high < low else (2 * low, 0)


def launch(what: str, tensors: dict, causal: bool, scale: float, row: tuple | None = None) -> None:
    """Run the kernel of one pass over all heads and blocks. `tensors`: its pointers by name, some of them None."""
    kernel, q, k = KERNELS[what], tensors["q"], tensors["k"]
    (B, H, n_queries, D), (_, Hkv, n_keys, _) = q.shape, k.shape
    options = launch_table.options(
        row or launch_table.row_for(architecture(q.device), D, what, q.dtype)
    )
    by_keys = what == "dkdv"
    blocks = (
        triton.cdiv(n_keys, options["BLOCK_N"])
        if by_keys
        else triton.cdiv(n_queries, options["BLOCK_M"])
    )
    strides = {
        f"{name}_strides": x.stride()[:3]
        for name, x in tensors.items()
        if x is not None and x.ndim == 4
    }
    sizes = {"n_queries": n_queries, "n_keys": n_keys, "scale": scale * LOG2E.value}
    low, high = split(D)
    constants = {"GROUP": H // Hkv, "CAUSAL": causal, "D": D, "LOW": low, "HIGH": high}
    if blocks > 0 and B > 0:
        with torch.cuda.device_of(q):
            kernel[blocks, Hkv if by_keys else H, B](
                **tensors, **strides, **sizes, **constants, **options
            )


# --- the operator: one node for torch.compile, activation checkpointing and FlopCounterMode


def like_rows(x):
    """Memory of x's shape (B, H, T, D) that lies as (B, T, H, D), so that its heads join without a copy."""
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


@torch.library.custom_op("mpt::flash_attention", mutates_args=())
def forward_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    bounds: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse): out as q, lse (B, H, Tq) fp32, base 2."""
    out, lse = like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "slopes": slopes, "bounds": bounds}
    launch("forward", tensors, causal, scale)
    return out, lse


@torch.library.custom_op("mpt::flash_attention_backward", mutates_args=())
def backward_operator(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, slopes: Tensor | None,
    bounds: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv). The dq kernel leaves delta for the dk, dv kernel."""
    dq, dk, dv, delta = like_rows(q), like_rows(k), like_rows(v), torch.empty_like(lse)
    do = do if do.stride(-1) == 1 else do.contiguous()
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "do": do,
        "lse": lse,
        "delta": delta,
        "slopes": slopes,
        "bounds": bounds,
    }
    launch("dq", tensors | {"out": out, "dq": dq}, causal, scale)
    launch("dkdv", tensors | {"dk": dk, "dv": dv}, causal, scale)
    return dq, dk, dv


@forward_operator.register_fake
def forward_shapes(q, k, v, slopes, bounds, causal, scale):
    return like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@backward_operator.register_fake
def backward_shapes(do, q, k, v, out, lse, slopes, bounds, causal, scale):
    return like_rows(q), like_rows(k), like_rows(v)


def keep_for_backward(ctx, inputs, output):
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


@functools.partial(forward_operator.register_autograd, setup_context=keep_for_backward)
def gradients(ctx, do, _):
    q, k, v, slopes, bounds, out, lse = ctx.saved_tensors
    return (
        *backward_operator(do, q, k, v, out, lse, slopes, bounds, ctx.causal, ctx.scale),
        None,
        None,
        None,
        None,
    )


@register_flop_formula(torch.ops.mpt.flash_attention)
def forward_flops(q_shape, k_shape, *args, **kwargs) -> int:
    """Two matmuls with full score matrices, as PyTorch counts its own attention: causality is not deducted."""
    B, H, n_queries, D = q_shape
    return 2 * 2 * B * H * n_queries * k_shape[2] * D


@register_flop_formula(torch.ops.mpt.flash_attention_backward)
def backward_flops(do_shape, q_shape, k_shape, *args, **kwargs) -> int:
    """Five matmuls, as PyTorch counts them; these kernels do seven."""
    return forward_flops(q_shape, k_shape) * 5 // 2


def flash_attention(
    q, k, v, *, alibi_slopes=None, causal=True, softmax_scale=None, sequence_ids=None
):
    """softmax(q k^T * softmax_scale + bias) v, differentiable once, without a T x T tensor. Returns (B, H, Tq, D).

    q: (B, H, Tq, D), k and v: (B, Hkv, Tk, D), H a multiple of Hkv, D at most 128, any strides; bf16, fp16 or fp32
    (under autocast: its dtype). The queries are the last Tq of the Tk positions. alibi_slopes: (H,) fp32, without
    gradient. sequence_ids: (B, Tk) integers; documents lie one after another, a new one begins where the id changes,
    and none sees another. A query that may see no key gives zeros. Raises config.UserError, a ValueError.
    """
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    check(q, k, v, alibi_slopes, sequence_ids)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    bounds = None if sequence_ids is None else document_bounds(sequence_ids)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    return forward_operator(q, k, v, slopes, bounds, causal, scale)[0]


def check(q, k, v, slopes, sequence_ids) -> None:
    """Refuse what the kernels cannot do, and say what can; words are made only then, since this runs in every step."""
    if not (
        q.ndim == k.ndim == 4
        and k.shape == v.shape
        and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    ):
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise UserError(
            f"flash_attention wants q (B, H, Tq, D) and k, v (B, Hkv, Tk, D), not {shapes}"
        )
    (B, H, n_queries, D), (_, Hkv, n_keys, _), device = q.shape, k.shape, q.device
    if Hkv == 0 or H % Hkv > 0:
        raise UserError(f"flash_attention: {H} query heads are not a multiple of {Hkv} key heads")
    if D > 128:
        raise UserError(
            f"flash_attention has head dims up to 128, not {D}: take attn_impl=sdpa, or more heads"
        )
    if not (
        q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16, torch.float32)
    ):
        dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
        raise UserError(
            f"flash_attention wants q, k, v all bf16, fp16 or fp32, not {dtypes}: cast them"
        )
    if device.type != "cuda" and not INTERPRETED.value:
        raise UserError(
            f"flash_attention runs on CUDA and ROCm GPUs, not on {device.type}: take attn_impl=sdpa or blocks, or set "
            "TRITON_INTERPRET=1 to run it in Triton's interpreter, very slowly"
        )
    if not k.device == v.device == device:
        raise UserError(f"q, k, v lie on {device}, {k.device}, {v.device}: move them to one device")
    if slopes is not None and (slopes.shape, slopes.dtype, slopes.device) != (
        (H,),
        torch.float32,
        device,
    ):
        advice = "attention.alibi_slopes(n_heads, device=...) makes them"
        raise UserError(
            f"alibi_slopes must be ({H},) fp32 on {device}, not {slopes.dtype}: {advice}"
        )
    if slopes is not None and slopes.requires_grad:
        raise UserError(
            "alibi_slopes get no gradient here: detach them, or take attn_impl=reference"
        )
    if sequence_ids is not None:
        integers = not sequence_ids.is_floating_point() and sequence_ids.device == device
        if sequence_ids.shape != (B, n_keys) or not integers or n_queries > n_keys:
            given = f"{tuple(sequence_ids.shape)} {sequence_ids.dtype} on {sequence_ids.device}"
            wanted = f"integers ({B}, {n_keys}) on {device}, with no more queries than keys"
            raise UserError(f"sequence_ids must be {wanted}, not {given} with {n_queries} queries")


def document_bounds(sequence_ids):
    """(B, T) ids -> (B, 2, T) int32: where the document of each position begins, and where it ends (exclusive)."""
    T = sequence_ids.shape[1]
    position = torch.arange(T, device=sequence_ids.device)
    edge = torch.ones_like(sequence_ids[:, :1], dtype=torch.bool)
    change = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    begin = torch.where(torch.cat([edge, change], 1), position, 0).cummax(1).values
    end = (
        torch.where(torch.cat([change, edge], 1), position + 1, T).flip(1).cummin(1).values.flip(1)
    )
    return torch.stack([begin, end], 1).to(torch.int32)


# --- the obvious version, and measuring


def reference_attention(
    q, k, v, alibi_slopes=None, causal=True, softmax_scale=None, sequence_ids=None
):
    """What `flash_attention` computes, with all scores in memory."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    n_queries, n_keys = q.shape[2], k.shape[2]
    i = torch.arange(n_keys - n_queries, n_keys, device=q.device)[:, None]  # (Tq, 1)
    j = torch.arange(n_keys, device=q.device)  # (Tk,)
    s = (
        q @ k.transpose(-2, -1) * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    )  # (B, H, Tq, Tk)
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None].to(s.dtype) * (i - j).abs()
    visible = j <= i if causal else torch.ones_like(j <= i)
    if sequence_ids is not None:
        document = F.pad((sequence_ids[:, 1:] != sequence_ids[:, :-1]).cumsum(1), (1, 0))  # (B, Tk)
        visible = (
            visible & (document[:, n_keys - n_queries :, None] == document[:, None, :])[:, None]
        )
    s = s.masked_fill(~visible, -math.inf)
    p = torch.softmax(s, dim=-1).masked_fill(
        ~visible.any(-1, keepdim=True), 0
    )  # rows that see no key
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
):
    """The largest errors of out, dq, dk and dv against float64, each relative to the largest exact value."""
    torch.manual_seed(0)
    shapes = [(B, n_queries, H, D), (B, n_keys, Hkv, D), (B, n_keys, Hkv, D), (B, n_queries, H, D)]
    q, k, v, do = (torch.randn(shape, device=device).to(dtype).transpose(1, 2) for shape in shapes)
    slopes = torch.exp2(-8 / H * torch.arange(1.0, H + 1, device=device)) if alibi else None
    ids = (
        torch.arange(n_keys, device=device).expand(B, -1) // (n_keys // 3 + 1)
        if documents
        else None
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attention(*leaves, alibi_slopes=slopes, causal=causal, sequence_ids=ids)
    exact_leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = reference_attention(*exact_leaves, slopes, causal, None, ids)
    found = out, *torch.autograd.grad(out, leaves, do)
    right = exact, *torch.autograd.grad(exact, exact_leaves, do.double())
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right, strict=True)]


def demonstrate(device) -> None:
    """Print errors against float64; raise if one is too large."""
    n = 48 if INTERPRETED.value else 1000
    cases = [
        {},
        {"alibi": False},
        {"causal": False},
        {"documents": True},
        {"D": 96},
        {"D": 128, "Hkv": 2},
    ]
    print(f"largest relative error of   out       dq       dk       dv    ({device}, {n} tokens)")
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        for case in cases:
            errors = compare(device, dtype, n_queries=n, n_keys=n, **case)
            print(f"{str(dtype)[6:]:9s} {str(case or ''):20s}", *(f"{e:.1e} " for e in errors))
            require(
                all(e < limit for e in errors),
                f"flash_attention is off in {dtype} {case}: {errors}",
            )


def tune(device, T: int = 4096, H: int = 16) -> None:
    """Print the fastest row of each pass on this GPU, for LAUNCH: causal bf16, ALiBi, 4 x H heads x T."""
    for D in (64, 128):
        q, k, v, do = (
            torch.randn(4, T, H, D, device=device).bfloat16().transpose(1, 2) for _ in range(4)
        )
        slopes = torch.exp2(-8 / H * torch.arange(1.0, H + 1, device=device))
        out, lse = forward_operator(q, k, v, slopes, None, True, D**-0.5)
        tensors = {
            "q": q,
            "k": k,
            "v": v,
            "do": do,
            "out": out,
            "lse": lse,
            "slopes": slopes,
            "bounds": None,
        }
        tensors |= {
            "dq": like_rows(q),
            "dk": like_rows(k),
            "dv": like_rows(v),
            "delta": torch.empty_like(lse),
        }
        rows = {}
        for what, kernel in KERNELS.items():
            mine = {name: x for name, x in tensors.items() if name in kernel.arg_names}
            once = functools.partial(launch, what, mine, True, D**-0.5)
            rows[what] = launch_table.fastest(
                f"{what}, heads of {D}", once, triton.testing.do_bench
            )
        print(f'    ("{architecture(q.device)}", {D}): {rows},', flush=True)


def main(argv) -> None:
    if config.wants_help(argv):
        config.show_help()
    require(argv in ([], ["--tune"]), "usage: python -m gpu_kernels.flash_attention [--tune]")
    there = torch.cuda.is_available()
    require(there or not argv, "--tune measures a GPU, and there is none here")
    if (
        not there and not INTERPRETED.value
    ):  # Triton reads the variable when a kernel is decorated: begin anew
        again = [sys.executable, "-m", "gpu_kernels.flash_attention"]
        os.execve(sys.executable, again, os.environ | {"TRITON_INTERPRET": "1"})
    if argv:
        return tune(torch.device("cuda"))
    demonstrate("cuda" if there else "cpu")
    if there and not INTERPRETED.value:
        bench = [
            sys.executable,
            "-m",
            "bench",
            "attention",
            "--head_dims=128",
            "--lengths=1024,4096",
        ]
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*bench, f"--out={folder}"], check=True)


if __name__ == "__main__":
    config.run(main)

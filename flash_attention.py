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
(i - origin) right in lse. `origin` is the program's first row: numbers stay small there, where fp32 is precise.
Slopes are fp32. Without causality the bias is -slope * |i - j|, element by element.

What a query may see is one interval of keys [first, last): causality sets its end, a packed document both ends, ragged
lengths the end of everything. Blocks outside are skipped, blocks that lie inside for every row need no mask.

NVIDIA and AMD run the same source. What differs: a wavefront is 64 threads wide and a compute unit of an MI250 or MI300
has 64 KiB of shared memory (LDS) where an H100 has 227, so AMD's blocks are smaller and one stage deep; `waves_per_eu`
exists there only. All of it is in LAUNCH.

    python flash_attention.py           compare with float64 (without a GPU in Triton's interpreter); a table on a GPU
    python flash_attention.py --tune    measure launch settings on this GPU, print rows for LAUNCH

Dao, FlashAttention-2 (2023), algorithms 1 and 2; Press et al., ALiBi (2021), section 3. Read next: attention.py.
"""

import functools
import itertools
import math
import os
import statistics
import sys

import torch
from torch.utils.flop_counter import register_flop_formula

from config import require

try:
    import triton
    import triton.language as tl
except ImportError as missing:
    raise ImportError(
        "flash_attention.py needs triton: torch for CUDA and ROCm brings it; on a Linux CPU: pip install 'triton>=3.4'"
    ) from missing

LOG2E = tl.constexpr(math.log2(math.e))
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # TRITON_INTERPRET=1: kernels run in NumPy

# (architecture, largest head dim, pass): BLOCK_M queries, BLOCK_N keys, num_warps, num_stages (, waves_per_eu on AMD)
LAUNCH = {
    ("sm_80", 64, "forward"): (128, 64, 4, 3),
    ("sm_80", 64, "dq"): (128, 64, 8, 2),
    ("sm_80", 64, "dkdv"): (64, 128, 8, 2),
    ("sm_80", 128, "forward"): (128, 64, 8, 3),
    ("sm_80", 128, "dq"): (128, 32, 8, 2),
    ("sm_80", 128, "dkdv"): (32, 128, 8, 2),
    ("sm_90", 64, "forward"): (128, 128, 8, 3),
    ("sm_90", 64, "dq"): (128, 64, 8, 2),
    ("sm_90", 64, "dkdv"): (64, 128, 8, 2),
    ("sm_90", 128, "forward"): (128, 128, 8, 2),
    ("sm_90", 128, "dq"): (128, 64, 8, 2),
    ("sm_90", 128, "dkdv"): (64, 128, 8, 2),
    ("gfx90a", 64, "forward"): (128, 64, 4, 1, 2),
    ("gfx90a", 64, "dq"): (64, 64, 4, 1, 1),
    ("gfx90a", 64, "dkdv"): (32, 64, 4, 1, 1),
    ("gfx90a", 128, "forward"): (128, 32, 4, 1, 2),
    ("gfx90a", 128, "dq"): (64, 32, 4, 1, 1),
    ("gfx90a", 128, "dkdv"): (32, 64, 4, 1, 1),
}
UNKNOWN = (64, 32, 4, 1)  # fits every GPU since 2017; also what fp32 takes, whose elements are twice as large
PASSES = ("forward", "dq", "dkdv")


# --- pieces of a kernel


@triton.jit
def head_of(ptr, strides, b, h):
    """Where the (T, D) rows of one head begin. 64-bit: large batches pass 2^31 elements."""
    return ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def load_columns(tile, stride, i, n_rows, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    d = FIRST + tl.arange(0, WIDTH)
    there = (i < n_rows)[:, None]
    if FIRST + WIDTH > D:
        there = there & (d < D)[None, :]
    return tl.load(tile + i[:, None] * stride + d[None, :], mask=there, other=0.0)


@triton.jit
def load_rows(head, stride, start, n, BLOCK: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Rows start .. start + BLOCK of a head of n rows, zeros behind them: one tensor (BLOCK, LOW), or two.

    Widths are powers of two, so D = 96 is 64 + 32 and not 128.
    """
    tile = head + tl.cast(start, tl.int64) * stride
    i = tl.arange(0, BLOCK)
    low = load_columns(tile, stride, i, n - start, 0, LOW, D)
    if HIGH == 0:
        return (low,)
    else:
        return (low, load_columns(tile, stride, i, n - start, LOW, HIGH, D))


@triton.jit
def store_columns(tile, stride, i, n_rows, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    d = FIRST + tl.arange(0, WIDTH)
    there = (i < n_rows)[:, None] & (d < D)[None, :]
    tl.store(tile + i[:, None] * stride + d[None, :], x.to(tile.dtype.element_ty), mask=there)


@triton.jit
def store_rows(head, stride, start, n, rows, BLOCK: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    tile = head + tl.cast(start, tl.int64) * stride
    i = tl.arange(0, BLOCK)
    store_columns(tile, stride, i, n - start, rows[0], 0, LOW, D)
    if HIGH > 0:
        store_columns(tile, stride, i, n - start, rows[1], LOW, HIGH, D)


@triton.jit
def dot(a, b, total=None):
    """a @ b + total in fp32. ieee: fp32 inputs are not rounded to tf32, which one vendor has and the other has not."""
    if INTERPRETED:  # where bf16 dots multiply raw bits
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def rows_dot_rows(a, b):
    """a b^T for rows of one or two tensors: (M, D), (N, D) -> (M, N)."""
    s = dot(a[0], tl.trans(b[0]))
    if len(a) == 2:
        s = dot(a[1], tl.trans(b[1]), s)
    return s


@triton.jit
def add_product(total, p, rows):
    """total + p rows: (M, D), (M, N), (N, D) -> (M, D), p rounded to the rows' dtype."""
    p = p.to(rows[0].dtype)
    if len(rows) == 1:
        return (dot(p, rows[0], total[0]),)
    else:
        return (dot(p, rows[0], total[0]), dot(p, rows[1], total[1]))


@triton.jit
def scaled(rows, factor):
    if len(rows) == 1:
        return (rows[0] * factor,)
    else:
        return (rows[0] * factor, rows[1] * factor)


@triton.jit
def zeros(BLOCK: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    low = tl.zeros([BLOCK, LOW], tl.float32)
    if HIGH == 0:
        return (low,)
    else:
        return (low, tl.zeros([BLOCK, HIGH], tl.float32))


@triton.jit
def add_alibi(s, i, j, origin, slope, CAUSAL: tl.constexpr):
    """The bias, less what is constant in a row of the causal one: see `row_bias`. i and j broadcast over s."""
    if CAUSAL:
        return s + slope * (j - origin).to(tl.float32)
    else:
        return s - slope * tl.abs(i - j).to(tl.float32)


@triton.jit
def row_bias(i, origin, slope, CAUSAL: tl.constexpr):
    """What `add_alibi` left out of row i, with its sign turned."""
    return slope * (i - origin).to(tl.float32) * CAUSAL


@triton.jit
def document_of(bounds, b, position, n_keys):
    """Of each position: where its document begins and ends. Without documents all is one."""
    if bounds is None:
        return tl.zeros_like(position), tl.zeros_like(position) + n_keys
    else:
        there = (position >= 0) & (position < n_keys)
        begin = bounds + b.to(tl.int64) * 2 * n_keys + position
        return tl.load(begin, mask=there, other=n_keys), tl.load(begin + n_keys, mask=there, other=0)


@triton.jit
def visible_keys(bounds, b, i, n_keys, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Queries at positions i see keys first .. last, one interval each; the program walks over begin .. end and needs
    no mask before `whole`."""
    first, last = document_of(bounds, b, i, n_keys)
    if CAUSAL:
        last = tl.minimum(last, i + 1)
    begin = tl.min(first) // BLOCK_N * BLOCK_N
    end = tl.maximum(tl.max(last), 0)
    if bounds is None:
        whole = tl.maximum(tl.min(last), 0) // BLOCK_N * BLOCK_N
    else:
        whole = begin
    return first, last, begin, whole, end


# --- kernels


@triton.jit
def forward_kernel(
    q, k, v, out, lse, slopes, bounds, q_strides, k_strides, v_strides, out_strides, n_queries, n_keys, scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out and lse of BLOCK_M queries. Grid: (blocks of queries, heads, batch)."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the last rows see most keys: they go first
    h, b = tl.program_id(1), tl.program_id(2)
    k_head, v_head = head_of(k, k_strides, b, h // GROUP), head_of(v, v_strides, b, h // GROUP)
    query = start + tl.arange(0, BLOCK_M)
    origin = start + n_keys - n_queries  # position of the first row among the keys
    i = query + n_keys - n_queries
    slope = 0.0 if slopes is None else tl.load(slopes + h) * LOG2E
    first, last, begin, whole, end = visible_keys(bounds, b, i, n_keys, CAUSAL, BLOCK_N)

    rows = load_rows(head_of(q, q_strides, b, h), q_strides[2], start, n_queries, BLOCK_M, D, LOW, HIGH)
    o = zeros(BLOCK_M, LOW, HIGH)
    m = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, so that -inf - m is never NaN
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    for masked in tl.static_range(2):
        for at in range(whole if masked else begin, end if masked else whole, BLOCK_N):
            j = at + tl.arange(0, BLOCK_N)
            keys = load_rows(k_head, k_strides[2], at, n_keys, BLOCK_N, D, LOW, HIGH)
            s = rows_dot_rows(rows, keys) * scale
            if slopes is not None:
                s = add_alibi(s, i[:, None], j[None, :], origin, slope, CAUSAL)
            if masked:
                s = tl.where((j[None, :] >= first[:, None]) & (j[None, :] < last[:, None]), s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            shrink = tl.exp2(m - m_new)
            l = l * shrink + tl.sum(p, 1)  # noqa: E741
            values = load_rows(v_head, v_strides[2], at, n_keys, BLOCK_N, D, LOW, HIGH)
            o = add_product(scaled(o, shrink[:, None]), p, values)
            m = m_new

    seen = l > 0  # a row that sees no key gives zeros, and lse = inf gives it P = 0 in the backward
    o = scaled(o, tl.where(seen, 1 / tl.where(seen, l, 1), 0)[:, None])
    store_rows(head_of(out, out_strides, b, h), out_strides[2], start, n_queries, o, BLOCK_M, D, LOW, HIGH)
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
    """dq and delta of BLOCK_M queries. Grid: (blocks of queries, heads, batch). The walk of the forward."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    h, b = tl.program_id(1), tl.program_id(2)
    k_head, v_head = head_of(k, k_strides, b, h // GROUP), head_of(v, v_strides, b, h // GROUP)
    query = start + tl.arange(0, BLOCK_M)
    origin = start + n_keys - n_queries  # position of the first row among the keys
    i = query + n_keys - n_queries
    slope = 0.0 if slopes is None else tl.load(slopes + h) * LOG2E
    first, last, begin, whole, end = visible_keys(bounds, b, i, n_keys, CAUSAL, BLOCK_N)

    rows = load_rows(head_of(q, q_strides, b, h), q_strides[2], start, n_queries, BLOCK_M, D, LOW, HIGH)
    outs = load_rows(head_of(out, out_strides, b, h), out_strides[2], start, n_queries, BLOCK_M, D, LOW, HIGH)
    grads = load_rows(head_of(do, do_strides, b, h), do_strides[2], start, n_queries, BLOCK_M, D, LOW, HIGH)
    row_delta = tl.sum(outs[0].to(tl.float32) * grads[0].to(tl.float32), 1)
    if HIGH > 0:
        row_delta += tl.sum(outs[1].to(tl.float32) * grads[1].to(tl.float32), 1)
    row = (b * tl.num_programs(1) + h).to(tl.int64) * n_queries + query
    tl.store(delta + row, row_delta, mask=query < n_queries)
    row_lse = tl.load(lse + row, mask=query < n_queries, other=float("inf"))
    row_lse += row_bias(i, origin, slope, CAUSAL)

    total = zeros(BLOCK_M, LOW, HIGH)
    for masked in tl.static_range(2):
        for at in range(whole if masked else begin, end if masked else whole, BLOCK_N):
            j = at + tl.arange(0, BLOCK_N)
            keys = load_rows(k_head, k_strides[2], at, n_keys, BLOCK_N, D, LOW, HIGH)
            values = load_rows(v_head, v_strides[2], at, n_keys, BLOCK_N, D, LOW, HIGH)
            s = rows_dot_rows(rows, keys) * scale
            if slopes is not None:
                s = add_alibi(s, i[:, None], j[None, :], origin, slope, CAUSAL)
            if masked:
                s = tl.where((j[None, :] >= first[:, None]) & (j[None, :] < last[:, None]), s, -float("inf"))
            p = tl.exp2(s - row_lse[:, None])
            ds = p * (rows_dot_rows(grads, values) - row_delta[:, None])
            total = add_product(total, ds, keys)
    total = scaled(total, scale / LOG2E)
    store_rows(head_of(dq, dq_strides, b, h), dq_strides[2], start, n_queries, total, BLOCK_M, D, LOW, HIGH)


@triton.jit
def dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, slopes, bounds,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, n_queries, n_keys, scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys, over all query heads that share them. Grid: (blocks of keys, key heads, batch).

    Scores are transposed, (BLOCK_N, BLOCK_M), so that P^T and dS^T are ready to multiply do and q. One loop with a mask:
    a second one without it costs more registers than it saves time.
    """
    start = tl.program_id(0) * BLOCK_N  # the first keys are seen by most queries: they go first
    key_head, b = tl.program_id(1), tl.program_id(2)
    j = start + tl.arange(0, BLOCK_N)
    past = n_keys - n_queries  # position of query 0
    first, last = document_of(bounds, b, j, n_keys)  # of the positions that may see a key
    if CAUSAL:
        first = tl.maximum(first, j)
    elif bounds is None:
        first += past  # of more queries than keys, the first have negative positions
    begin = tl.maximum(tl.min(first) - past, 0) // BLOCK_M * BLOCK_M
    end = tl.minimum(tl.max(last) - past, n_queries)

    keys = load_rows(head_of(k, k_strides, b, key_head), k_strides[2], start, n_keys, BLOCK_N, D, LOW, HIGH)
    values = load_rows(head_of(v, v_strides, b, key_head), v_strides[2], start, n_keys, BLOCK_N, D, LOW, HIGH)
    total_dk = zeros(BLOCK_N, LOW, HIGH)
    total_dv = zeros(BLOCK_N, LOW, HIGH)
    for member in range(GROUP):
        h = key_head * GROUP + member
        q_head, do_head = head_of(q, q_strides, b, h), head_of(do, do_strides, b, h)
        head_rows = (b * tl.num_programs(1) * GROUP + h).to(tl.int64) * n_queries
        slope = 0.0 if slopes is None else tl.load(slopes + h) * LOG2E
        for at in range(begin, end, BLOCK_M):
            query = at + tl.arange(0, BLOCK_M)
            i = query + past
            rows = load_rows(q_head, q_strides[2], at, n_queries, BLOCK_M, D, LOW, HIGH)
            grads = load_rows(do_head, do_strides[2], at, n_queries, BLOCK_M, D, LOW, HIGH)
            row_lse = tl.load(lse + head_rows + query, mask=query < n_queries, other=float("inf"))
            row_delta = tl.load(delta + head_rows + query, mask=query < n_queries, other=0.0)
            s = rows_dot_rows(keys, rows) * scale
            if slopes is not None:
                s = add_alibi(s, i[None, :], j[:, None], start, slope, CAUSAL)
                row_lse += row_bias(i, start, slope, CAUSAL)
            if CAUSAL or bounds is not None:
                s = tl.where(i[None, :] >= first[:, None], s, -float("inf"))
            if bounds is not None:
                s = tl.where(i[None, :] < last[:, None], s, -float("inf"))
            p = tl.exp2(s - row_lse[None, :])
            total_dv = add_product(total_dv, p, grads)
            ds = p * (rows_dot_rows(values, grads) - row_delta[None, :])
            total_dk = add_product(total_dk, ds, rows)
    total_dk = scaled(total_dk, scale / LOG2E)
    store_rows(head_of(dk, dk_strides, b, key_head), dk_strides[2], start, n_keys, total_dk, BLOCK_N, D, LOW, HIGH)
    store_rows(head_of(dv, dv_strides, b, key_head), dv_strides[2], start, n_keys, total_dv, BLOCK_N, D, LOW, HIGH)


# --- launching them


def split(head_dim: int) -> tuple[int, int]:
    """Two widths, powers of two from 16 on, that hold a head with the least waste. The second may be 0."""
    low = max(16, 1 << (head_dim.bit_length() - 1))
    if low >= head_dim:
        return low, 0
    high = max(16, triton.next_power_of_2(head_dim - low))
    return (low, high) if high < low else (2 * low, 0)


def architecture(device: torch.device) -> str:
    """sm_90, gfx942, ...: the name by which LAUNCH knows a GPU; `cpu` in the interpreter."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@functools.cache
def rows_of(arch: str) -> dict:
    """The rows of one architecture, {(head dim, pass): row}; a line on stderr, once, if there are none."""
    rows = {(dim, what): row for (a, dim, what), row in LAUNCH.items() if a == arch}
    if not rows and arch != "cpu":
        print(
            f"flash_attention: {arch} has no row in LAUNCH and takes {UNKNOWN}. Measure it: "
            "python flash_attention.py --tune",
            file=sys.stderr,
        )
    return rows


def launch_options(arch: str, head_dim: int, what: str, dtype: torch.dtype) -> dict:
    """Block sizes, warps and stages of one pass ("forward", "dq", "dkdv"), as keyword arguments of its kernel."""
    rows = rows_of(arch)
    wide_enough = [dim for dim, w in rows if w == what and dim >= head_dim]
    row = rows[min(wide_enough), what] if wide_enough and dtype != torch.float32 else UNKNOWN
    return dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "waves_per_eu"), row, strict=False))


def launch(kernel, what: str, tensors: dict, causal: bool, scale: float) -> None:
    """Run `kernel` over all heads and all blocks of queries, or of keys. `tensors`: its pointers by name, or None."""
    q, k = tensors["q"], tensors["k"]
    (B, H, n_queries, D), (_, Hkv, n_keys, _) = q.shape, k.shape
    low, high = split(D)
    options = launch_options(architecture(q.device), D, what, q.dtype)
    by_keys = what == "dkdv"
    grid = triton.cdiv(n_keys, options["BLOCK_N"]) if by_keys else triton.cdiv(n_queries, options["BLOCK_M"])
    strides = {f"{name}_strides": x.stride()[:3] for name, x in tensors.items() if x is not None and x.ndim == 4}
    sizes = {"n_queries": n_queries, "n_keys": n_keys, "scale": scale * LOG2E.value}
    constants = {"GROUP": H // Hkv, "CAUSAL": causal, "D": D, "LOW": low, "HIGH": high}
    if grid > 0 and B > 0:
        with torch.cuda.device_of(q):
            kernel[grid, Hkv if by_keys else H, B](**tensors, **strides, **sizes, **constants, **options)


# --- the operator


def like_rows(x):
    """Memory for a tensor of x's shape (B, H, T, D) that lies as (B, T, H, D): its heads join without a copy."""
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


@torch.library.custom_op("mpt::flash_attention", mutates_args=())
def forward_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    bounds: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): out as q, lse (B, H, Tq) fp32, base 2. A custom operator: one node to torch.compile, checkpointing
    and FlopCounterMode."""
    out, lse = like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "slopes": slopes, "bounds": bounds}
    launch(forward_kernel, "forward", tensors, causal, scale)
    return out, lse


@torch.library.custom_op("mpt::flash_attention_backward", mutates_args=())
def backward_operator(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    slopes: torch.Tensor | None,
    bounds: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv). The dq pass leaves delta for the dk, dv pass."""
    dq, dk, dv, delta = like_rows(q), like_rows(k), like_rows(v), torch.empty_like(lse)
    do = do if do.stride(-1) == 1 else do.contiguous()
    tensors = {"q": q, "k": k, "v": v, "do": do, "lse": lse, "delta": delta, "slopes": slopes, "bounds": bounds}
    launch(dq_kernel, "dq", tensors | {"out": out, "dq": dq}, causal, scale)
    launch(dkdv_kernel, "dkdv", tensors | {"dk": dk, "dv": dv}, causal, scale)
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
    grads = backward_operator(do, q, k, v, out, lse, slopes, bounds, ctx.causal, ctx.scale)
    return *grads, None, None, None, None


@register_flop_formula(torch.ops.mpt.flash_attention)
def forward_flops(q_shape, k_shape, *args, **kwargs) -> int:
    """Two matmuls of full score matrices, as PyTorch counts its own attention: causality is not deducted."""
    (B, H, n_queries, D), n_keys = q_shape, k_shape[2]
    return 2 * 2 * B * H * n_queries * n_keys * D


@register_flop_formula(torch.ops.mpt.flash_attention_backward)
def backward_flops(do_shape, q_shape, k_shape, *args, **kwargs) -> int:
    """Five matmuls, as PyTorch counts them; these kernels do seven."""
    return forward_flops(q_shape, k_shape) * 5 // 2


def flash_attention(q, k, v, *, alibi_slopes=None, causal=True, softmax_scale=None, sequence_ids=None):
    """softmax(q k^T * softmax_scale + bias) v, differentiable once, without a T x T tensor.

    q: (B, H, Tq, D), k and v: (B, Hkv, Tk, D), H a multiple of Hkv, D at most 128, bf16, fp16 or fp32 (under autocast:
    its dtype), any strides. The queries are the last Tq of the Tk positions. alibi_slopes: (H,) fp32, no gradient.
    sequence_ids: (B, Tk) integers; documents lie one after another, a new one begins where the id changes, and
    none sees another. A query that may see no key gives zeros. Returns (B, H, Tq, D).
    Raises config.UserError, a ValueError, for anything else.
    """
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    check(q, k, v, alibi_slopes, sequence_ids)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    bounds = None if sequence_ids is None else document_bounds(sequence_ids)
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    return forward_operator(q, k, v, slopes, bounds, causal, scale)[0]


def check(q, k, v, slopes, sequence_ids) -> None:
    """Refuse what the kernels cannot do, and say what can."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    require(
        q.ndim == k.ndim == 4 and k.shape == v.shape and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3]),
        f"flash_attention wants q (B, H, Tq, D) and k, v (B, Hkv, Tk, D), not {shapes}",
    )
    (B, H, n_queries, D), (_, Hkv, n_keys, _) = q.shape, k.shape
    require(Hkv > 0 and H % Hkv == 0, f"flash_attention: {H} query heads are not a multiple of {Hkv} key heads")
    require(D <= 128, f"flash_attention has head dims up to 128, not {D}: take attn_impl=sdpa or more heads")
    require(
        q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16, torch.float32),
        f"flash_attention wants q, k, v all bf16, fp16 or fp32, not {q.dtype}, {k.dtype}, {v.dtype}: cast them",
    )
    require(
        q.device.type == "cuda" or INTERPRETED.value,
        f"flash_attention runs on CUDA and ROCm GPUs, not on {q.device.type}: take attn_impl=sdpa or blocks, "
        "or set TRITON_INTERPRET=1 to run it in Triton's interpreter, very slowly",
    )
    if slopes is not None:
        require(
            slopes.shape == (H,) and slopes.dtype == torch.float32 and slopes.device == q.device,
            f"alibi_slopes must be ({H},) fp32 on {q.device}, not {tuple(slopes.shape)} {slopes.dtype} on "
            f"{slopes.device}: attention.alibi_slopes(n_heads, device=...) makes them",
        )
    if sequence_ids is not None:
        require(
            sequence_ids.shape == (B, n_keys) and not sequence_ids.is_floating_point() and n_queries <= n_keys,
            f"sequence_ids must be integers of shape ({B}, {n_keys}), one for each key, with no more queries than keys, "
            f"not {tuple(sequence_ids.shape)} {sequence_ids.dtype} for {n_queries} queries",
        )


def document_bounds(sequence_ids):
    """(B, T) ids -> (B, 2, T) int32: where the document of each position begins, and where it ends (exclusive)."""
    T = sequence_ids.shape[1]
    position = torch.arange(T, device=sequence_ids.device)
    edge = torch.ones_like(sequence_ids[:, :1], dtype=torch.bool)
    change = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    begin = torch.where(torch.cat([edge, change], 1), position, 0).cummax(1).values
    end = torch.where(torch.cat([change, edge], 1), position + 1, T).flip(1).cummin(1).values.flip(1)
    return torch.stack([begin, end], 1).to(torch.int32)

"""Attention: softmax(q k^T * scale + bias) v, causal, with ALiBi: the formula, and fast ways to it.

Shapes are those of F.scaled_dot_product_attention: q (B, H, Tq, D), k and v (B, Hkv, Tk, D). k and
v may have fewer heads than q (grouped-query attention).

    scores = q k^T * scale + bias                      (B, H, Tq, Tk)
    bias   = -slope[h] * (i - j), or -inf if j > i     for query i and key j of head h
    out    = softmax(scores) v                         (B, H, Tq, D)

ALiBi (Press et al., 2021) needs no position vectors: each head lowers the score of a key in
proportion to its distance, so near tokens count more. The slopes fall geometrically over the heads.
Softmax does not change when a constant is added to a row, so under causality -slope * (i - j) and
slope * j are the same bias. The second depends on the key alone, so fast kernels without support
for a bias can compute it too: extra columns of q hold ones, extra columns of k hold
slope * j / scale (`with_alibi_columns`).

    attn_impl   what runs                                 how it does ALiBi
    reference   two matmuls and a softmax, any device     the bias is added to the T x T scores
    blocks      the same for 64 or 128 queries at a time  the same
                with the keys that they see, and a
                backward that adds to dk and dv in place
    sdpa        F.scaled_dot_product_attention            extra columns and no mask, so that flash
                                                          and cuDNN kernels can be used. Cases that
                                                          need a mask run the memory-efficient or
                                                          the math kernel
    flex        compiled FlexAttention, on GPUs           a score_mod
                (it has no backward on a CPU)
    triton      gpu_kernels/flash_attention.py, on GPUs   a vector per block of keys, in the kernel

All of these compute the same function, so a model trained with one can continue with another. An
attention that computes another function, such as a sliding window, is part of the model: it belongs
in VARIANTS, at the end of this file.

`choose` resolves `auto`. Decoding one token on a cache has its own path, `one_query_attention`. So
has a step of fixed shapes, for CUDA graphs: a `Window` says which part of the cache a query sees.

With `sequence_ids`, a row holds several documents that do not see each other.

Run `python attention.py` to see the implementations agree.
"""

import functools
import importlib.util
import math
import os
import shutil
import sysconfig
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from program import arguments, require, run

HAS_TRITON = importlib.util.find_spec("triton") is not None  # PyTorch for CUDA and ROCm brings it
# Triton builds the launchers of its kernels with a C compiler; some containers lack what it needs.
C_COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
PYTHON_HEADER = os.path.join(sysconfig.get_path("include"), "Python.h")
CAN_BUILD = bool(C_COMPILER) and os.path.exists(PYTHON_HEADER)
# Queries of a block; in 16 bits twice as many. Small blocks skip more of the future, large ones
# multiply faster. These are within 3 % of the best on the CPU of `choose`, 256 to 2,048 tokens.
BLOCK = 64


def alibi_slopes(n_heads, bias_max=8.0, device=None):
    """The slope of each head, (H,) fp32 (ALiBi paper, section 3).

    2^(-i * bias_max / n) for i = 1..n, where n is n_heads rounded up to a power of two. If n_heads
    is not a power of two, the slopes of even i come first, then those of odd i, cut off at n_heads,
    as in MPT.
    """
    n = 2 ** math.ceil(math.log2(n_heads))
    i = torch.arange(1, n + 1, dtype=torch.float32, device=device)
    slopes = torch.exp2(-i * bias_max / n)
    if n == n_heads:
        return slopes
    return torch.cat([slopes[1::2], slopes[0::2]])[:n_heads]


def attention_bias(n_queries, n_keys, slopes, causal, device, sequence_ids=None):
    """What is added to the scores, fp32: -slope * |i - j|, and -inf where query i must not see j.

    slopes: (H,) or None; sequence_ids: (B, Tk) or None. Returns (Tq, Tk), with slopes (H, Tq, Tk),
    with sequence_ids (B, H or 1, Tq, Tk).
    """
    i = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]  # (Tq, 1)
    j = torch.arange(n_keys, device=device)[None, :]  # (1, Tk)
    bias = torch.zeros(n_queries, n_keys, device=device)
    if slopes is not None:
        bias = -slopes[:, None, None] * (i - j).abs()
    if causal:
        bias = bias.masked_fill(j > i, -math.inf)
    if sequence_ids is not None:
        query_ids = sequence_ids[:, None, -n_queries:, None]
        key_ids = sequence_ids[:, None, None, :]
        bias = bias.masked_fill(query_ids != key_ids, -math.inf)  # (B, 1, Tq, Tk) mask
    return bias


def reference_attention(q, k, v, slopes, causal, scale, dropout_p, sequence_ids=None):
    """The formula as it is in the paper, with all scores in memory."""
    bias = attention_bias(q.shape[2], k.shape[2], slopes, causal, q.device, sequence_ids)
    scores = (q * scale) @ k.transpose(-2, -1)  # (B, H, Tq, Tk)
    scores += bias.to(scores.dtype)  # in place: the scores are the largest tensor of a step
    probs = torch.softmax(scores, dim=-1)
    return F.dropout(probs, dropout_p) @ v


def attention(
    q,
    k,
    v,
    *,
    impl="auto",
    alibi_slopes=None,
    causal=True,
    softmax_scale=None,
    dropout_p=0.0,
    sequence_ids=None,
    window=None,
    qkv=None,
):
    """softmax(q k^T * softmax_scale + bias) v, (B, H, Tq, D).

    q: (B, H, Tq, D); k, v: (B, Hkv, Tk, D), H a multiple of Hkv. The queries are the last Tq of the
    Tk positions, as in decoding on a cache. alibi_slopes: (H,) fp32, or None for no ALiBi.
    softmax_scale: None means 1 / sqrt(D). sequence_ids: (B, Tk) integers, or None: documents lie
    one after another, each with its own id, and do not see each other. window: the keys that a
    single query sees, instead of all; the causal implementations alone know it. qkv: the fused
    projection's output, (B, T, (H + 2 Hkv) * D), if q, k, v are views of it: `triton` then makes
    its gradient in one piece, where autograd would join dq, dk and dv in a copy. UserError for an
    unknown `impl`, or one that cannot do what the arguments ask for.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    has_alibi = alibi_slopes is not None
    if window is not None:
        return window_attention(q, k, v, impl, alibi_slopes, scale, window)
    one_query = q.shape[2] == 1
    impl = choose(impl, q.device, q.dtype, q.shape[-1], has_alibi, dropout_p, one_query)

    # `one_query_attention` hands PyTorch the bias in k's dtype. Its kernels compute in fp32, so
    # rounding to 16 bits would be their largest error; sdpa's columns keep the bias precise.
    precise = not has_alibi or k.dtype.itemsize > 2
    may_take_short_path = impl not in VARIANTS and impl != "reference"
    if one_query and causal and precise and dropout_p == 0 and may_take_short_path:
        return one_query_attention(q, k, v, alibi_slopes, scale, sequence_ids)

    if impl == "triton":
        return triton_attention(q, k, v, alibi_slopes, causal, scale, dropout_p, sequence_ids, qkv)
    if k.shape[1] != q.shape[1]:
        groups = q.shape[1] // k.shape[1]  # query heads per key head
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    function = VARIANTS[impl].function if impl in VARIANTS else IMPLEMENTATIONS[impl]
    return function(q, k, v, alibi_slopes, causal, scale, dropout_p, sequence_ids)


def choose(impl, device, dtype, head_dim, alibi, dropout_p=0.0, one_query=False):
    """The implementation that runs: `impl` itself, or the fastest one if it is `auto`.

    device: a torch.device. alibi: whether the model uses it. one_query: a single query,
    for which the kernel has a launch row of its own. UserError for a name that is in neither table.

    A CPU takes `blocks`, a GPU `triton` for ALiBi in 16 bits, which needs no mask and no extra
    columns there, and `sdpa` otherwise. So do GPUs for which Triton has no matrix instructions
    (NVIDIA before Ampere, AMD before MI100 and Radeon RX 7000), and GPUs on which the kernel gives
    other results than the formula (gpu_kernels/first_use.py).

    Measured: on a CPU, bench/results/cpu.md; on one H200 (torch 2.11.0, triton 3.6.0, 2026-11-28),
    TFLOP/s of forward and backward, bf16, causal, 2,048 and 8,192 tokens:

                                  heads of 64    heads of 128
        no bias   sdpa (cuDNN)     345   436      445   566
                  triton           252   306      267   327
        ALiBi     triton           242   292      261   318   (launch rows since: about 291, 355)
                  flex             206   251      271   347
                  sdpa             170   254      163   242

    The figures in brackets are not measured: they are computed from the times of single passes with
    the rows that `launch_table` has now.
    """
    require_known(impl)
    if impl != "auto":
        return impl
    if device.type == "cpu":
        return "blocks"
    can_run_triton = device.type == "cuda" and HAS_TRITON and CAN_BUILD
    supported = head_dim <= 128 and dropout_p == 0
    in_16_bits = dtype in (torch.bfloat16, torch.float16)
    if not (can_run_triton and supported and alibi and in_16_bits):
        return "sdpa"
    from gpu_kernels import first_use  # only GPUs need it

    return "triton" if first_use.suits(device, head_dim, one_query) else "sdpa"


def require_known(impl: str) -> None:
    """UserError for a name that is in neither table."""
    require(
        impl in ("auto", *IMPLEMENTATIONS, *VARIANTS),
        f"attn_impl={impl} is neither in IMPLEMENTATIONS nor in VARIANTS of attention.py: add it",
    )


def blockwise_attention(q, k, v, slopes, causal, scale, dropout_p, sequence_ids=None):
    """The formula for one block of queries at a time, without the keys that are in its future.

    Differentiable once, unless there is dropout.
    """
    if not causal or q.numel() == 0:
        return reference_attention(q, k, v, slopes, causal, scale, dropout_p, sequence_ids)
    if dropout_p > 0 or (slopes is not None and slopes.requires_grad):
        return blocks_by_autograd(q, k, v, slopes, causal, scale, dropout_p, sequence_ids)
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    with torch.autocast(kind, enabled=False):  # forward and backward in one dtype
        needs_grad = torch.is_grad_enabled()
        return BlockwiseAttention.apply(q, k, v, slopes, scale, sequence_ids, needs_grad)


def blocks_by_autograd(q, k, v, slopes, causal, scale, dropout_p, sequence_ids=None):
    """The same blocks with autograd's gradients, which takes dropout as well.

    Autograd makes a whole gradient of k and v for each block, then adds them up.
    """
    outputs = []
    for queries, n_seen in query_blocks(q.shape[2], k.shape[2], q.dtype):
        seen_ids = None if sequence_ids is None else sequence_ids[:, :n_seen]
        seen_k = k[:, :, :n_seen]
        seen_v = v[:, :, :n_seen]
        block_q = q[:, :, queries]
        outputs.append(
            reference_attention(block_q, seen_k, seen_v, slopes, causal, scale, dropout_p, seen_ids)
        )
    return torch.cat(outputs, dim=2)


def query_blocks(n_queries, n_keys, dtype):
    """(slice of the queries, number of keys that its last query sees) of each block."""
    rows = BLOCK if dtype.itemsize > 2 else 2 * BLOCK
    for begin in range(0, n_queries, rows):
        end = min(begin + rows, n_queries)
        yield slice(begin, end), n_keys - n_queries + end


class BlockwiseAttention(torch.autograd.Function):
    """The autograd node of `blockwise_attention`, with g for the gradient of the output:

        dv = probs^T g                  d probs  = g v^T
        dq = d scores k * scale         d scores = probs * (d probs - rowsum(probs * d probs))
        dk = d scores^T q * scale

    Autograd would do the same by blocks, but it would make a whole dk and dv of each block, mostly
    zeros, to add them up. Here each block adds to the part that it sees.
    """

    @staticmethod
    def forward(ctx, q, k, v, slopes, scale, sequence_ids, needs_grad):
        """q (B, H, Tq, D), k and v (B, H, Tk, D) -> (B, H, Tq, D), laid out as (B, Tq, H, D).

        needs_grad: whether autograd is on for the caller. In here it is always off.
        """
        B, H, n_queries, D = q.shape
        n_keys = k.shape[2]
        out = q.new_empty(B, n_queries, H, D).transpose(1, 2)
        q = q.reshape(-1, n_queries, D) * scale  # (B * H, Tq, D)
        k = k.reshape(-1, n_keys, D)
        v = v.reshape(-1, n_keys, D)

        blocks = list(query_blocks(n_queries, n_keys, q.dtype))
        first_queries, _ = blocks[0]  # no block has more
        bias = last_bias(first_queries.stop, n_keys, slopes, q)
        kept = []
        for queries, n_seen in blocks:
            scores = torch.bmm(q[:, queries], k[:, :n_seen].mT)  # (B * H, rows, n_seen)
            add_bias(scores.view(B, H, -1, n_seen), bias, sequence_ids)
            probs = torch.softmax(scores, dim=-1, out=scores)
            out[:, :, queries] = torch.bmm(probs, v[:, :n_seen]).view(B, H, -1, D)
            if needs_grad:
                kept.append(probs)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.blocks = blocks
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        """grad_out (B, H, Tq, D) -> dq, dk, dv, as q, k and v."""
        q, k, v, *kept = ctx.saved_tensors  # q is scaled already
        B, H, n_queries, D = grad_out.shape
        grad_out = grad_out.reshape(q.shape)
        dq = q.new_empty(B, n_queries, H, D).transpose(1, 2)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        for (queries, n_seen), probs in zip(ctx.blocks, kept, strict=True):
            g = grad_out[:, queries]  # (B * H, rows, D)
            dv[:, :n_seen] += torch.bmm(probs.mT, g)
            dprobs = torch.bmm(g, v[:, :n_seen].mT)
            # PyTorch's own kernel for the backward of softmax, here in place
            dscores = torch._softmax_backward_data(
                dprobs, probs, -1, probs.dtype, grad_input=dprobs
            )
            dk[:, :n_seen] += torch.bmm(dscores.mT, q[:, queries])
            block_dq = torch.bmm(dscores, k[:, :n_seen]).mul_(ctx.scale)
            dq[:, :, queries] = block_dq.view(B, H, -1, D)
        dk = dk.view(B, H, -1, D)
        dv = dv.view(B, H, -1, D)
        return dq, dk, dv, None, None, None, None


def last_bias(n_queries, n_keys, slopes, q):
    """The bias of the last block of queries in q's dtype; without ALiBi, only for its own keys.

    A bias depends on the distance i - j alone. So that of an earlier block, which sees fewer keys,
    is the right part of it. For blocks of one query and four keys:

        last block    -3 -2 -1  0
        the second          -1  0
    """
    n_keys = n_queries if slopes is None else n_keys
    return attention_bias(n_queries, n_keys, slopes, True, q.device).to(q.dtype)


def add_bias(scores, bias, sequence_ids):
    """Add the bias to the scores (B, H, rows, n_seen) of a block, in place."""
    rows, n_seen = scores.shape[2:]
    bias = bias[..., -rows:, -n_seen:]
    scores[..., -bias.shape[-1] :] += bias
    if sequence_ids is not None:
        key_ids = sequence_ids[:, None, None, :n_seen]
        query_ids = key_ids[..., -rows:].mT
        scores.masked_fill_(query_ids != key_ids, -math.inf)


def one_query_attention(q, k, v, slopes, scale, sequence_ids):
    """Decoding: the newest token, q (B, H, 1, D), sees all keys of the cache, (B, Hkv, Tk, D)."""
    n_keys = k.shape[2]
    bias = None
    if slopes is not None:
        minus_distance = torch.arange(1 - n_keys, 1, device=q.device)
        bias = slopes[:, None, None] * minus_distance  # (H, 1, Tk)
    if sequence_ids is not None:
        other_document = (sequence_ids != sequence_ids[:, -1:])[:, None, None]  # (B, 1, 1, Tk)
        bias = (q.new_zeros(1) if bias is None else bias).masked_fill(other_document, -math.inf)
    return grouped_attention(q, k, v, bias, scale)


def grouped_attention(q, k, v, bias, scale):
    """SDPA of one query, q (B, H, 1, D), and keys (B, Hkv, Tk, D).

    bias: (B or 1, H or 1, 1, Tk), or None. The query heads that share a key head become the queries
    of that head, (B, Hkv, H / Hkv, D), so keys and values need not be repeated.
    """
    B, H, _, D = q.shape
    n_key_heads, n_keys = k.shape[1:3]
    if bias is not None:
        bias = bias.to(q.dtype).expand(B, H, 1, n_keys).view(B, n_key_heads, -1, n_keys)
    grouped_q = q.view(B, n_key_heads, -1, D)
    out = F.scaled_dot_product_attention(grouped_q, k, v, attn_mask=bias, scale=scale)
    return out.reshape(B, H, 1, D)  # no view: kernels of a GPU return (B, Tq, H, D), transposed


class Window:
    """The keys first <= j < last of n_keys that one query sees; its own key is the last of them.

    first, last: (B,) int64 on the device. So shapes and the host's part do not depend on where a
    text begins and ends, and one captured CUDA graph serves many steps. What the kernels read is
    computed once, for all layers.
    """

    def __init__(self, first, last, n_keys: int):
        self.first = first
        self.last = last
        self.n_keys = n_keys
        self.shared_bias = None

    @functools.cached_property
    def bounds(self):
        """As flash_attention.document_bounds, (B, 2, n_keys) int32, for the last position alone.

        The kernel takes the query to stand there. It skips blocks of keys outside of the window.
        ALiBi's distances are then too large, by the same number for all keys of a row, which
        changes no softmax.
        """
        bounds = self.first.new_empty(len(self.first), 2, self.n_keys, dtype=torch.int32)
        bounds[:, :, -1] = torch.stack([self.first, self.last], dim=1)
        return bounds

    def bias(self, slopes, dtype):
        """What is added to the scores, (B, H or 1, 1, n_keys). All layers share it."""
        if self.shared_bias is None:
            j = torch.arange(self.n_keys, device=self.first.device)
            distance = self.last[:, None] - 1 - j  # (B, n_keys)
            hidden = (distance < 0) | (j < self.first[:, None])
            if slopes is None:
                bias = torch.zeros(hidden.shape, device=hidden.device)[:, None, None]
            else:
                bias = -slopes[:, None, None] * distance[:, None, None]
            self.shared_bias = bias.masked_fill(hidden[:, None, None], -math.inf).to(dtype)
        return self.shared_bias


def window_attention(q, k, v, impl, slopes, scale, window):
    """One query, q (B, H, 1, D), sees its `window` of k and v, (B, Hkv, n_keys, D)."""
    if one_query_kernel(impl, q.device, q.dtype, q.shape[-1]):
        from gpu_kernels.flash_attention import forward_operator

        return forward_operator(q, k, v, slopes, window.bounds, True, scale)[0]
    return grouped_attention(q, k, v, window.bias(slopes, q.dtype), scale)


def one_query_kernel(impl, device, dtype, head_dim) -> bool:
    """Whether `window_attention` takes this project's kernel, and not SDPA with a mask.

    `auto` takes it with and without ALiBi: a mask would make SDPA read all of the cache.
    """
    return choose(impl, device, dtype, head_dim, alibi=True, one_query=True) == "triton"


def sdpa_attention(q, k, v, slopes, causal, scale, dropout_p, sequence_ids=None):
    """PyTorch's scaled_dot_product_attention, which chooses a kernel.

    Plain causal training builds no mask, with ALiBi or without. Documents, several queries on a
    cache, and ALiBi without causality need one.

    On NVIDIA's Hopper and Blackwell data center GPUs, PyTorch lets cuDNN do what needs no mask,
    with head dims that are multiples of 8, if its cuDNN is 9.15.1 or newer (the wheels of PyTorch
    2.11 and later for CUDA 13). Older ones are wrong for some lengths, so nothing here asks for
    them. The backward of cuDNN and of flash attention sums in no fixed order, so two runs with
    `sdpa` differ in their last bits there; `triton` has one order.
    """
    n_queries, n_keys, head_dim = q.shape[2], k.shape[2], q.shape[3]
    if causal and slopes is not None:
        q, k, v = with_alibi_columns(q, k, v, slopes, scale)
        slopes = None  # the columns hold the bias: keep it out of the mask
    on_a_cache = 1 < n_queries < n_keys  # a single query sees every key: no mask
    mask = None
    if sequence_ids is not None or slopes is not None or (causal and on_a_cache):
        mask = attention_bias(n_queries, n_keys, slopes, causal, q.device, sequence_ids).to(q.dtype)
    is_causal = causal and n_queries == n_keys and sequence_ids is None
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )
    return out[..., :head_dim]


def with_alibi_columns(q, k, v, slopes, scale):
    """Widen D by 8, so that q' k'^T * scale = q k^T * scale + slope * j. v' has zeros there.

    k' holds slope * j / scale, q' holds ones. bf16 keeps only 8 bits of a number, too few for
    slope * j at j = 2000. So three columns hold it in three parts, whose sum is exact to about
    24 bits; the kernel adds their products in fp32. The other five columns are zeros, because D
    must stay a multiple of 8.
    """
    position = torch.arange(k.shape[2], device=k.device, dtype=torch.float32)
    rest = slopes[:, None] * position / scale  # (H, Tk) fp32
    parts = []
    for _ in range(2):
        part = rest.to(torch.bfloat16).to(k.dtype)
        parts.append(part)
        rest = rest - part.float()
    parts.append(rest.to(k.dtype))
    columns = F.pad(torch.stack(parts, dim=-1), (0, 5))  # (H, Tk, 8)
    k = torch.cat([k, columns.expand(k.shape[0], -1, -1, -1)], dim=-1)
    return F.pad(q, (0, 8), value=1.0), k, F.pad(v, (0, 8))


def flex_attention(q, k, v, slopes, causal, scale, dropout_p, sequence_ids=None):
    """FlexAttention: the bias is a function compiled into the kernel, which skips hidden blocks."""
    require(dropout_p == 0, "attn_impl=flex has no dropout: set attn_pdrop=0 or another attn_impl")
    if q.shape[2] < k.shape[2]:
        # Decoding: there is no block to skip, and each new length would be compiled again.
        return sdpa_attention(q, k, v, slopes, causal, scale, dropout_p, sequence_ids)

    def alibi(score, b, h, i, j):
        """The score of query i and key j in row b, head h, with its bias."""
        return score - slopes[h] * (i - j).abs()

    block_mask = causal_block_mask(q.shape[2], q.device) if causal else None
    if sequence_ids is not None:
        block_mask = document_block_mask(sequence_ids, causal)
    score_mod = None if slopes is None else alibi
    return compiled_flex()(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale)


@functools.cache
def compiled_flex():
    """PyTorch's flex_attention, compiled once: uncompiled, it would keep all T x T scores."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    return torch.compile(flex)


@functools.lru_cache(maxsize=4)
def causal_block_mask(n_tokens, device):
    """FlexAttention's table of the 128 x 128 blocks of scores that are needed, cached by shape."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b, h, i, j):
        """Whether query i sees key j."""
        return j <= i

    return create_block_mask(visible, None, None, n_tokens, n_tokens, device=device)


def document_block_mask(sequence_ids, causal):
    """The same for documents (B, T) that do not see each other, made for each batch."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b, h, i, j):
        """Whether query i sees key j in row b."""
        same_document = sequence_ids[b, i] == sequence_ids[b, j]
        return same_document & ((j <= i) | (not causal))

    B, T = sequence_ids.shape
    return create_block_mask(visible, B, None, T, T, device=sequence_ids.device)


def triton_attention(q, k, v, slopes, causal, scale, dropout_p, sequence_ids=None, qkv=None):
    """This project's kernels, imported here because PyTorch for CPUs comes without triton."""
    require(
        dropout_p == 0, "attn_impl=triton has no dropout: set attn_pdrop=0 or another attn_impl"
    )
    require(
        HAS_TRITON,
        "attn_impl=triton needs triton, which comes with PyTorch for CUDA and ROCm: "
        "use attn_impl=sdpa",
    )
    from gpu_kernels.flash_attention import flash_attention

    return flash_attention(
        q,
        k,
        v,
        alibi_slopes=slopes,
        causal=causal,
        softmax_scale=scale,
        sequence_ids=sequence_ids,
        qkv=qkv,
    )


IMPLEMENTATIONS = {
    "reference": reference_attention,
    "blocks": blockwise_attention,
    "sdpa": sdpa_attention,
    "flex": flex_attention,
    "triton": triton_attention,
}


class Variant(NamedTuple):
    """An attention that computes another function than MPT's.

    It takes the arguments of the implementations; k and v come repeated to H heads. It must handle
    fewer queries than keys (decoding on a cache) and sequence_ids (padding, packed documents).
    """

    function: Callable
    stays_compiled: bool  # in evaluation, too; True if uncompiled it would keep all T x T scores


# {name: Variant}. To add one, put its name into AttentionImpl (config.py), too, and its FLOPs into
# flops.ATTENDED_KEYS: tests/test_another_attention.py checks every entry.
VARIANTS = {}


def stays_compiled(impl: str) -> bool:
    """Whether blocks with this attention stay compiled in evaluation.

    Otherwise they are not compiled once more for evaluation, and for each of the many shapes of
    zero-shot tasks. Uncompiled, FlexAttention would store all T x T scores.
    """
    return VARIANTS[impl].stays_compiled if impl in VARIANTS else impl == "flex"


def function_of(impl: str) -> str:
    """The function that `impl` computes: a variant's name, or "auto" for all implementations.

    UserError for an unknown name.
    """
    require_known(impl)
    return impl if impl in VARIANTS else "auto"


def demonstrate(argv) -> None:
    """Print how far each implementation in bf16 is from the obvious one in fp64."""
    arguments(argv)
    torch.manual_seed(0)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    q, k, v = (
        torch.randn(2, heads, 600, 64, device=device, dtype=torch.bfloat16) for heads in (12, 4, 4)
    )
    slopes = alibi_slopes(12, device=device)
    q64, k64, v64 = (x.cpu().double() for x in (q, k, v))
    exact = attention(q64, k64, v64, impl="reference", alibi_slopes=slopes.cpu().double())
    print(f"12 heads over 4, 600 tokens, ALiBi, bf16 on {device}; largest difference from fp64:")
    for impl in ("reference", "blocks", "sdpa"):
        out = attention(q, k, v, impl=impl, alibi_slopes=slopes)
        error = (out.cpu() - exact).abs().max().item()
        print(f"  {impl:10s} {error:.1e}")
        assert error < 3e-2, impl


if __name__ == "__main__":
    run(demonstrate)

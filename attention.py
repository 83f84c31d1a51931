"""Attention: softmax(q k^T * scale + bias) v, causal, with ALiBi: the formula, and fast ways to it.

Shapes are those of F.scaled_dot_product_attention: q (B, H, Tq, D), k and v (B, Hkv, Tk, D). k and
v may have fewer heads than q (grouped-query attention).

    scores = q k^T * scale + bias                      (B, H, Tq, Tk)
    bias   = -slope[h] * (i - j)                       for query i and key j of head h
             -inf if j > i, or i - j > window          what the query does not see
    out    = softmax(scores) v                         (B, H, Tq, D)

ALiBi (Press et al., 2021) needs no position vectors: each head lowers the score of a key in
proportion to its distance, so near tokens count more. The slopes fall geometrically over the heads.

    attn_impl   what runs                                ALiBi              window         softcap
    reference   two matmuls and a softmax                added to T x T     in the bias    yes
    blocks      the same for a block of queries at a     the same           fewer keys     yes
                time: fast/cpu_attention.py
    sdpa        F.scaled_dot_product_attention           extra columns      a mask         no
    flex        fast/flex_attention.py, GPUs             a score_mod        a block mask   yes
    triton      fast/flash_attention.py, GPUs            in the kernel      bounds         yes

All of these compute the same function, so a model trained with one can continue with another. An
attention that computes another function is part of the model: it belongs in VARIANTS, at the end of
this file. `choose` resolves `auto`. One new token on a cache has a way of its own,
`one_query_attention`.

Run `python attention.py` to see the implementations agree.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fast import cpu_attention
from program import UserError, arguments, run

# --- The formula


class ScoreRule(NamedTuple):
    """What the weights of the values depend on, besides q and k."""

    scale: float
    slopes: torch.Tensor | None = None  # of ALiBi: (H,) fp32
    causal: bool = True
    sequence_ids: torch.Tensor | None = None  # (B, Tk): documents do not see each other
    window: int | None = None  # a query sees so many keys before its own, and no more
    softcap: float | None = None  # c: a score is c * tanh(score / c) before the bias (Gemma 2)
    dropout_p: float = 0.0


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


def autocast_dtype(x):
    """The dtype that autocast gives to matmuls on x's device; x's own dtype without autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def attention_bias(n_queries, n_keys, rule: ScoreRule, device):
    """What is added to the scores, fp32: -slope * |i - j|, and -inf where query i must not see j.

    Returns (Tq, Tk), with slopes (H, Tq, Tk), with sequence_ids (B, H or 1, Tq, Tk).
    """
    i = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]  # (Tq, 1)
    j = torch.arange(n_keys, device=device)[None, :]  # (1, Tk)
    bias = torch.zeros(n_queries, n_keys, device=device)
    if rule.slopes is not None:
        bias = -rule.slopes[:, None, None] * (i - j).abs()
    if rule.causal:
        bias = bias.masked_fill(j > i, -math.inf)
    if rule.window is not None:
        bias = bias.masked_fill(i - j > rule.window, -math.inf)
    if rule.sequence_ids is not None:
        query_ids = rule.sequence_ids[:, None, -n_queries:, None]
        key_ids = rule.sequence_ids[:, None, None, :]
        bias = bias.masked_fill(query_ids != key_ids, -math.inf)  # (B, 1, Tq, Tk) mask
    return bias


def reference_attention(q, k, v, rule: ScoreRule):
    """The formula as it is in the paper, with all scores in memory."""
    scores = (q * rule.scale) @ k.transpose(-2, -1)  # (B, H, Tq, Tk)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    bias = attention_bias(q.shape[2], k.shape[2], rule, q.device)
    scores += bias.to(scores.dtype)  # in place: the scores are the largest tensor of a step
    probs = torch.softmax(scores, dim=-1)
    return F.dropout(probs, rule.dropout_p) @ v


def blockwise_attention(q, k, v, rule: ScoreRule):
    """The formula for one block of queries at a time, with the keys that the block sees."""
    if not rule.causal or q.numel() == 0:
        return reference_attention(q, k, v, rule)
    if cpu_attention.suits(rule):
        q, k, v = (x.to(autocast_dtype(x)) for x in (q, k, v))
        rows, columns = cpu_attention.bias_shape(q, k, rule)
        last_bias = attention_bias(rows, columns, rule._replace(sequence_ids=None), q.device)
        return cpu_attention.blockwise_attention(q, k, v, last_bias.to(q.dtype), rule)
    outputs = []  # the obvious version
    for queries, keys in cpu_attention.query_blocks(q, k, rule.window):
        ids = None if rule.sequence_ids is None else rule.sequence_ids[:, keys]
        block = q[:, :, queries], k[:, :, keys], v[:, :, keys]
        outputs.append(reference_attention(*block, rule._replace(sequence_ids=ids)))
    return torch.cat(outputs, dim=2)


# --- Which way


def attention(
    q, k, v, *, impl="auto", alibi_slopes=None, softmax_scale=None, visible=None, qkv=None, **rule
):
    """softmax(q k^T * softmax_scale + bias) v, (B, H, Tq, D).

    q: (B, H, Tq, D); k, v: (B, Hkv, Tk, D), H a multiple of Hkv. The queries are the last Tq of the
    Tk positions, as in decoding on a cache. alibi_slopes: (H,) fp32, or None. softmax_scale: None
    means 1 / sqrt(D). visible: which keys the query of a captured step sees
    (serving/step_graph.py). qkv: what q, k and v were made of, or None: `triton` makes one gradient
    for all three if they are views of it. rule: other fields of `ScoreRule`. UserError for an
    unknown `impl`, or one that cannot do what the arguments ask for.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    rule = ScoreRule(scale, alibi_slopes, **rule)
    if visible is not None:
        return visible.attention(q, k, v, impl, rule)
    needs_mask = rule.slopes is not None or rule.window is not None
    one_query = q.shape[2] == 1
    case = q.device, q.dtype, q.shape[-1], needs_mask, rule.dropout_p, rule.softcap
    impl = choose(impl, *case, one_query)
    if one_query and impl in IMPLEMENTATIONS and suits_one_query(impl, k, rule):
        return one_query_attention(q, k, v, rule)

    if impl == "triton":
        return triton_attention(q, k, v, rule, qkv)
    if k.shape[1] != q.shape[1]:
        groups = q.shape[1] // k.shape[1]  # query heads per key head
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    function = VARIANTS[impl].function if impl in VARIANTS else IMPLEMENTATIONS[impl]
    return function(q, k, v, rule)


def choose(impl, device, dtype, head_dim, masked, dropout_p=0.0, softcap=None, one_query=False):
    """The implementation that runs: `impl` itself, or the fastest one if it is `auto`.

    device: a torch.device. masked: whether the model has ALiBi or a window. one_query: a single
    query, for which the kernel has a launch row of its own. UserError for a name that is in neither
    table.

    A CPU takes `blocks`. A GPU takes `triton` in 16 bits for ALiBi, a window or a softcap, which
    need no mask and no extra columns there, if Triton knows the GPU and its kernel gives the
    formula's results on it (fast/first_use.py). The rest takes `sdpa`, which has no softcap: with
    one it takes `flex`, or `blocks` where `flex` does not run. Measured:
    bench/results/attention_cpu.md, bench/results/h200.md.
    """
    require_known(impl)
    if impl != "auto":
        return impl
    if device.type == "cpu":
        return "blocks"
    on_gpu = device.type == "cuda"
    has_softcap = softcap is not None
    in_16_bits = dtype in (torch.bfloat16, torch.float16)
    needs_kernel = masked or has_softcap
    if on_gpu and needs_kernel and in_16_bits and head_dim <= 128 and dropout_p == 0:
        from fast import first_use  # only GPUs need it

        if first_use.suits(device, head_dim, one_query, has_softcap):
            return "triton"
    if not has_softcap:
        return "sdpa"
    return "flex" if on_gpu and dropout_p == 0 else "blocks"


def require_known(impl: str) -> None:
    """UserError for a name that is in neither table."""
    if impl not in ("auto", *IMPLEMENTATIONS, *VARIANTS):
        tables = "neither in IMPLEMENTATIONS nor in VARIANTS of attention.py"
        raise UserError(f"attn_impl={impl} is {tables}: add it")


# --- PyTorch's kernels


def sdpa_attention(q, k, v, rule: ScoreRule):
    """PyTorch's scaled_dot_product_attention, which chooses a kernel.

    Plain causal training builds no mask, with ALiBi or without. Documents, a window, several
    queries on a cache, and ALiBi without causality need one: those run the memory-efficient or the
    math kernel.

    On GPUs the backward of its fast kernels sums in no fixed order, so two runs with `sdpa` differ
    in their last bits there; `triton` has one order.
    """
    if rule.softcap is not None:
        raise UserError("attn_impl=sdpa has no softcap: use auto")
    n_queries, n_keys, head_dim = q.shape[2], k.shape[2], q.shape[3]
    if rule.causal and rule.slopes is not None:
        from fast.alibi_columns import with_alibi_columns

        q, k, v = with_alibi_columns(q, k, v, rule)
        rule = rule._replace(slopes=None)  # the columns hold the bias: keep it out of the mask
    hides_more = rule.sequence_ids is not None or rule.window is not None
    on_a_cache = 1 < n_queries < n_keys  # a single query sees every key: no mask
    mask = None
    if hides_more or rule.slopes is not None or (rule.causal and on_a_cache):
        mask = attention_bias(n_queries, n_keys, rule, q.device).to(q.dtype)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=rule.dropout_p,
        is_causal=rule.causal and n_queries == n_keys and not hides_more,
        scale=rule.scale,
    )
    return out[..., :head_dim]


# --- One new token on a cache


def suits_one_query(impl: str, k, rule: ScoreRule) -> bool:
    """Whether a single query takes `one_query_attention` in place of `impl`.

    PyTorch takes the bias in k's dtype. In 16 bits the rounding of ALiBi's bias would be the
    largest error, so there a model with ALiBi keeps `impl`: `sdpa` has precise columns instead.
    """
    is_precise = rule.slopes is None or k.dtype.itemsize > 2
    is_plain = rule.causal and rule.dropout_p == 0 and rule.softcap is None
    return is_precise and is_plain and impl != "reference"


def one_query_attention(q, k, v, rule: ScoreRule):
    """Decoding: the newest token, q (B, H, 1, D), sees the keys of the cache, (B, Hkv, Tk, D)."""
    sequence_ids = rule.sequence_ids
    if rule.window is not None:
        k = k[:, :, -rule.window - 1 :]
        v = v[:, :, -rule.window - 1 :]
        sequence_ids = None if sequence_ids is None else sequence_ids[:, -rule.window - 1 :]
    bias = None
    if rule.slopes is not None:
        minus_distance = torch.arange(1 - k.shape[2], 1, device=q.device)
        bias = rule.slopes[:, None, None] * minus_distance  # (H, 1, Tk)
    if sequence_ids is not None:
        other_document = (sequence_ids != sequence_ids[:, -1:])[:, None, None]  # (B, 1, 1, Tk)
        bias = (q.new_zeros(1) if bias is None else bias).masked_fill(other_document, -math.inf)
    return grouped_attention(q, k, v, bias, rule.scale)


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


# --- The fast ways on GPUs, imported only there


def flex_attention(q, k, v, rule: ScoreRule):
    """PyTorch's FlexAttention, compiled. Decoding takes a way without compilation."""
    if rule.dropout_p > 0:
        raise UserError("attn_impl=flex has no dropout: set attn_pdrop=0 or another attn_impl")
    if q.shape[2] < k.shape[2]:  # no block to skip, and each new length would be compiled again
        simple = sdpa_attention if rule.softcap is None else reference_attention
        return simple(q, k, v, rule)
    from fast.flex_attention import flex_attention as flex

    return flex(q, k, v, rule)


def triton_attention(q, k, v, rule: ScoreRule, qkv=None):
    """This project's kernels. UserError without triton, which PyTorch for CPUs does not bring."""
    if rule.dropout_p > 0:
        raise UserError("attn_impl=triton has no dropout: set attn_pdrop=0 or another attn_impl")
    from fast.flash_attention import flash_attention

    return flash_attention(
        q,
        k,
        v,
        alibi_slopes=rule.slopes,
        causal=rule.causal,
        softmax_scale=rule.scale,
        sequence_ids=rule.sequence_ids,
        window=rule.window,
        softcap=rule.softcap,
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

    It takes (q, k, v, rule) as the implementations do; k and v come repeated to H heads. It must
    handle fewer queries than keys (decoding on a cache), and sequence_ids (padding, packed
    documents).
    """

    function: Callable
    stays_compiled: bool  # in evaluation, too: needed if the plain function keeps T x T scores


# {name: Variant}. To add one, put its name into AttentionImpl (config.py), too, and its FLOPs into
# flops.ATTENDED_KEYS: tests/test_another_attention.py checks every entry.
VARIANTS = {}


def stays_compiled(impl: str) -> bool:
    """Whether blocks with this attention stay compiled in evaluation.

    Blocks usually run uncompiled there: zero-shot tasks have many shapes, and each of them would be
    compiled by itself. But FlexAttention would then store all T x T scores.
    """
    return VARIANTS[impl].stays_compiled if impl in VARIANTS else impl == "flex"


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

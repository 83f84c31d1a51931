"""Attention: softmax(q k^T * scale + bias) v, causal, with ALiBi, written the obvious way and called the fast ways.

ALiBi (Press et al., 2021) has no position vectors. Each head lowers the score of key j for query i by slope * (i - j),
so near tokens count more; slopes fall geometrically over the heads. Softmax ignores what is constant in a row, so
adding slope * j is the same thing: a bias that depends on the key alone. That lets every fast kernel do ALiBi
without a mask: q gets extra columns of ones and k gets slope * j / scale as extra columns (`with_alibi_columns`).

    impl        what runs                                   ALiBi
    reference   two matmuls and a softmax, any device       bias added to the scores; T x T scores are kept
    blocks      the same, 256 queries at a time, each       the same
                with the keys that it can see
    sdpa        F.scaled_dot_product_attention              extra columns: flash and cuDNN take no mask and need none;
                                                            with a mask (several queries on a cache, or not causal)
                                                            only the memory-efficient and math backends serve
    flex        compiled FlexAttention                      a score_mod; GPU (on a CPU it has no backward)
    triton      gpu_kernels/flash_attention.py              a vector per block of keys, inside the kernel; GPU

These compute one function, so any of them may go on with what another has trained. Another function, such as a window,
is part of the model and belongs into VARIANTS, at the end.

`auto` is decided by `choose`. On a GPU ALiBi in 16-bit numbers goes to `triton`, which needs neither a mask nor extra
columns, and the rest to `sdpa`. On a CPU it takes `blocks`, since flash attention there has the slower
backward: forward and backward of 8 x 6 heads x 512 tokens in bf16 take 41 ms by blocks, 46 at once, 93 by SDPA (2 cores
with AVX512-BF16). One query on a cache is `one_query_attention`'s whatever was chosen, but for `reference`, and for
ALiBi in 16 bits, whose bias would be too coarse.

Shapes are those of F.scaled_dot_product_attention: (B, H, T, D). k and v may have fewer heads (grouped-query). With
`sequence_ids` a row holds several documents that do not see each other: sdpa needs a mask then, the others do not.
Run `python attention.py` to see them agree. Read next: gpu_kernels/flash_attention.py, or loss.py to skip the kernels.
"""

import functools
import importlib.util
import math
import os
import shutil
import sysconfig

import torch
import torch.nn.functional as F

from config import arguments, require, run

HAS_TRITON = importlib.util.find_spec("triton") is not None  # torch for CUDA and ROCm brings it
CAN_BUILD = bool(
    os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
) and os.path.exists(
    os.path.join(sysconfig.get_path("include"), "Python.h")
)  # with these Triton builds what launches a kernel; some containers have neither
BLOCK = 256  # queries: the fastest of 64, 128 and 256 for 512 to 2,048 tokens on the CPU above


def alibi_slopes(n_heads, bias_max=8.0, device=None):
    """The slope of each head, (H,) fp32: 2^(-i * bias_max / n2), i = 1..n2, n2 the next power of two (section 3).

    When n_heads is no power of two, every second slope of n2 is taken first, as MPT does.
    """
    n2 = 2 ** math.ceil(math.log2(n_heads))
    slopes = torch.exp2(
        -torch.arange(1, n2 + 1, dtype=torch.float32, device=device) * bias_max / n2
    )
    return slopes if n2 == n_heads else torch.cat([slopes[1::2], slopes[0::2]])[:n_heads]


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
):
    """softmax(q k^T * softmax_scale + bias) v.

    q: (B, H, Tq, D); k, v: (B, Hkv, Tk, D) with H a multiple of Hkv; alibi_slopes: (H,) fp32 or None; sequence_ids:
    (B, Tk) integers or None: documents lie one after another, a new one begins where the id changes, and none sees
    another. The queries are the last Tq of the Tk positions, as when decoding on a cache. Returns (B, H, Tq, D).
    """
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    impl = choose(impl, q.device.type, q.dtype, q.shape[-1], alibi_slopes is not None, dropout_p)
    standard = impl not in VARIANTS and impl != "reference"
    exact = (
        alibi_slopes is None or k.dtype.itemsize > 2
    )  # a bias in 16 bits is too coarse: the columns below are not
    if q.shape[2] == 1 and causal and exact and dropout_p == 0 and standard:
        return one_query_attention(q, k, v, alibi_slopes, scale, sequence_ids)
    if (
        impl != "triton" and k.shape[1] != q.shape[1]
    ):  # grouped-query: every backend takes repeated heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    function = VARIANTS.get(impl) or IMPLEMENTATIONS[impl]
    return function(q, k, v, alibi_slopes, causal, scale, dropout_p, sequence_ids)


def choose(impl, device_type, dtype, head_dim, alibi, dropout_p=0.0):
    """The implementation that `auto` stands for in this case. UserError for a name that is in neither table."""
    known = impl in ("auto", *IMPLEMENTATIONS, *VARIANTS)
    require(
        known,
        f"attn_impl={impl} is neither in IMPLEMENTATIONS nor in VARIANTS of attention.py: add it",
    )
    if impl != "auto":
        return impl
    if device_type == "cpu":
        return "blocks"
    works = (
        device_type == "cuda" and HAS_TRITON and CAN_BUILD and head_dim <= 128 and dropout_p == 0
    )
    return "triton" if works and alibi and dtype in (torch.bfloat16, torch.float16) else "sdpa"


def attention_bias(n_queries, n_keys, slopes, causal, device, ids=None):
    """What is added to the scores, fp32: (Tq, Tk), or (H, Tq, Tk) with ALiBi: -slope * |i - j|, -inf where j > i; with
    ids (B, Tk) also where they differ, and (B, H or 1, Tq, Tk)."""
    i = torch.arange(n_keys - n_queries, n_keys, device=device)[
        :, None
    ]  # (Tq, 1): positions of the queries
    j = torch.arange(n_keys, device=device)[None, :]  # (1, Tk)
    bias = torch.zeros(n_queries, n_keys, device=device)
    if slopes is not None:
        bias = -slopes[:, None, None] * (i - j).abs()
    if causal:
        bias = bias.masked_fill(j > i, -math.inf)
    if ids is not None:
        others = ids[:, None, -n_queries:, None] != ids[:, None, None, :]  # (B, 1, Tq, Tk)
        bias = bias.masked_fill(others, -math.inf)
    return bias


def reference_attention(q, k, v, slopes, causal, scale, dropout_p, ids=None):
    """The formula, as it stands in the paper."""
    bias = attention_bias(q.shape[2], k.shape[2], slopes, causal, q.device, ids)
    scores = (q * scale) @ k.transpose(-2, -1)  # (B, H, Tq, Tk)
    scores += bias.to(scores.dtype)  # in place: the scores are the largest tensor of a step
    probs = torch.softmax(scores, dim=-1)
    return F.dropout(probs, dropout_p) @ v


def blockwise_attention(q, k, v, slopes, causal, scale, dropout_p, ids=None):
    """The formula for one block of queries after another: what causality hides costs nothing."""
    n_queries, past = q.shape[2], k.shape[2] - q.shape[2]
    if not causal or n_queries <= BLOCK:
        return reference_attention(q, k, v, slopes, causal, scale, dropout_p, ids)
    outputs = []
    for begin in range(0, n_queries, BLOCK):
        end = min(begin + BLOCK, n_queries)
        seen = past + end  # keys
        block = q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen]
        block_ids = None if ids is None else ids[:, :seen]
        outputs.append(reference_attention(*block, slopes, causal, scale, dropout_p, block_ids))
    return torch.cat(outputs, dim=2)


def one_query_attention(q, k, v, slopes, scale, ids):
    """The newest token on a cache sees all keys. A group's heads stand as queries of its keys: nothing is repeated."""
    (B, H, _, D), groups, n_keys = q.shape, k.shape[1], k.shape[2]
    bias = None  # (H, 1, Tk), with ids (B, H or 1, 1, Tk)
    if slopes is not None:
        bias = slopes[:, None, None] * torch.arange(1 - n_keys, 1, device=q.device)
    if ids is not None:
        others = (ids != ids[:, -1:])[:, None, None]
        bias = (q.new_zeros(1) if bias is None else bias).masked_fill(others, -math.inf)
    if bias is not None:
        bias = bias.to(q.dtype).expand(B, H, 1, n_keys).view(B, groups, -1, n_keys)
    out = F.scaled_dot_product_attention(
        q.view(B, groups, -1, D), k, v, attn_mask=bias, scale=scale
    )
    return out.view(B, H, 1, D)


def sdpa_attention(q, k, v, slopes, causal, scale, dropout_p, ids=None):
    """PyTorch's own choice of kernel. Plain causal training never builds a mask, with ALiBi or without."""
    n_queries, n_keys, head_dim = q.shape[2], k.shape[2], q.shape[3]
    if causal and slopes is not None:
        q, k, v, slopes = *with_alibi_columns(q, k, v, slopes, scale), None
    mask, square = None, causal and n_queries == n_keys and ids is None
    if ids is not None or slopes is not None or (causal and 1 < n_queries < n_keys):
        mask = attention_bias(n_queries, n_keys, slopes, causal, q.device, ids).to(q.dtype)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=square, scale=scale
    )
    return out[..., :head_dim]


def with_alibi_columns(q, k, v, slopes, scale):
    """Append 8 columns so that q' k'^T * scale = q k^T * scale + slope * j; v gets zeros. D must stay a multiple of 8.

    bf16 keeps 8 bits of slope * j, far too few at j = 2000, so k's three columns hold it in three parts whose sum
    is exact to about 24 bits; the products are added in the kernel's fp32 accumulator.
    """
    position = torch.arange(k.shape[2], device=k.device, dtype=torch.float32)
    rest = slopes[:, None] * position / scale  # (H, Tk) fp32
    parts = []
    for _ in range(2):
        parts.append(rest.to(torch.bfloat16).to(k.dtype))
        rest = rest - parts[-1].float()
    columns = torch.stack([*parts, rest.to(k.dtype)], dim=-1)  # (H, Tk, 3)
    k = torch.cat([k, F.pad(columns, (0, 5)).expand(k.shape[0], -1, -1, -1)], dim=-1)
    return F.pad(q, (0, 8), value=1.0), k, F.pad(v, (0, 8))


def flex_attention(q, k, v, slopes, causal, scale, dropout_p, ids=None):
    """FlexAttention: the bias is a function that the compiler puts into the kernel; hidden blocks are skipped."""
    require(dropout_p == 0, "attn_impl=flex has no dropout: set attn_pdrop=0 or another attn_impl")
    if (
        q.shape[2] < k.shape[2]
    ):  # decoding: no block to skip, and each length would be compiled anew
        return sdpa_attention(q, k, v, slopes, causal, scale, dropout_p, ids)

    def alibi(score, b, h, i, j):
        return score - slopes[h] * (i - j).abs()

    block_mask = causal_block_mask(q.shape[2], q.device) if causal else None
    if ids is not None:
        block_mask = document_block_mask(ids, causal)
    score_mod = None if slopes is None else alibi
    return compiled_flex()(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale)


@functools.cache
def compiled_flex():
    """Without compilation FlexAttention keeps all T x T scores, so it is always compiled, once."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    return torch.compile(flex)


@functools.lru_cache(maxsize=4)
def causal_block_mask(n_tokens, device):
    """Which blocks of 128 x 128 scores are needed: made once per shape."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b, h, i, j):
        return j <= i

    return create_block_mask(visible, None, None, n_tokens, n_tokens, device=device)


def document_block_mask(ids, causal):
    """The same for documents (B, T) that do not see each other: made for each batch."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b, h, i, j):
        return (ids[b, i] == ids[b, j]) & ((j <= i) | (not causal))

    B, T = ids.shape
    return create_block_mask(visible, B, None, T, T, device=ids.device)


def triton_attention(q, k, v, slopes, causal, scale, dropout_p, ids=None):
    """Our own kernels. Imported here: they need triton, which a CPU's torch does not bring."""
    require(
        dropout_p == 0, "attn_impl=triton has no dropout: set attn_pdrop=0 or another attn_impl"
    )
    require(
        HAS_TRITON,
        "attn_impl=triton needs triton, which torch for CUDA and ROCm brings: take attn_impl=sdpa",
    )
    from gpu_kernels.flash_attention import flash_attention

    return flash_attention(
        q, k, v, alibi_slopes=slopes, causal=causal, softmax_scale=scale, sequence_ids=ids
    )


IMPLEMENTATIONS = {
    "reference": reference_attention,
    "blocks": blockwise_attention,
    "sdpa": sdpa_attention,
    "flex": flex_attention,
    "triton": triton_attention,
}


# Attention that is another function. To add one, write its name here and in MPTConfig.attn_impl
# (config.py). It takes what the implementations take, k and v already repeated to H heads. It must
# handle fewer queries than keys (decoding on a cache) and sequence_ids (padding, packed documents):
# tests/test_attention.py checks that for all that stand here.
VARIANTS = {}


def function_of(impl: str) -> str:
    """What attn_impl says of the model: a variant's name, or "auto" where any implementation will do."""
    choose(impl, "cpu", torch.float32, 1, False)  # is it known
    return impl if impl in VARIANTS else "auto"


def demonstrate(argv) -> None:
    """Print the distance of each fast implementation from the obvious one in fp64."""
    arguments(argv)
    torch.manual_seed(0)
    device = (
        torch.accelerator.current_accelerator()
        if torch.accelerator.is_available()
        else torch.device("cpu")
    )
    q, k, v = (torch.randn(2, h, 600, 64, device=device, dtype=torch.bfloat16) for h in (12, 4, 4))
    slopes = alibi_slopes(12, device=device)
    q64, k64, v64 = (x.cpu().double() for x in (q, k, v))
    exact = attention(q64, k64, v64, impl="reference", alibi_slopes=slopes.cpu().double())
    print(f"12 heads over 4, 600 tokens, ALiBi, bf16 on {device}; largest difference from fp64:")
    for impl in ("reference", "blocks", "sdpa"):
        error = (
            (attention(q, k, v, impl=impl, alibi_slopes=slopes).cpu() - exact).abs().max().item()
        )
        print(f"  {impl:10s} {error:.1e}")
        assert error < 3e-2, impl


if __name__ == "__main__":
    run(demonstrate)

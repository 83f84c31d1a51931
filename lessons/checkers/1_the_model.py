"""Checks exercise 1: ALiBi's slopes, causal attention, and the number of parameters of an MPT."""

from unittest import mock

import torch

import attention
import flops
import model
from config import MPTConfig
from lessons.answers import close


def check_slopes(answer):
    """alibi_slopes for 1 to 64 heads"""
    for n_heads, bias_max in [(1, 8), (2, 8), (8, 16), (64, 8), (3, 8), (5, 8), (12, 16), (56, 8)]:
        got = answer.call("alibi_slopes", n_heads, bias_max=float(bias_max))
        what = f"alibi_slopes({n_heads}, bias_max={bias_max})"
        close(what, got, attention.alibi_slopes(n_heads, bias_max), 1e-6)


# --------------------------------------------------------------------------------------------------
# Attention: each of the first cases has one thing in it that can be wrong


def check_attention(answer):
    """causal_attention, as many queries as keys"""
    compare(answer, 1, 1, 1, 1)
    mask = "all scores are equal here, so query i has the mean of v over the keys j <= i. Put -inf"
    compare(answer, 1, 3, 3, 2, size=0, slope=0, hint=f"{mask} on the scores before the softmax")
    compare(answer, 1, 3, 3, 2, size=0)  # the bias alone
    compare(answer, 2, 5, 5, 4, slope=0)  # no bias
    compare(answer, 4, 65, 65, 16)
    compare(answer, 2, 9, 9, 4, size=15, tolerance=1e-3)  # exp(89) is inf in float32


def check_attention_on_a_cache(answer):
    """causal_attention, fewer queries than keys"""
    hint = "the queries are the last Tq of the Tk positions: the mask and the bias count from there"
    for H, Tq, Tk, D in [(1, 1, 2, 1), (2, 2, 3, 2), (3, 4, 20, 8)]:
        compare(answer, H, Tq, Tk, D, hint=hint)


def compare(answer, H, Tq, Tk, D, size=1.0, slope=1.0, tolerance=1e-5, hint="") -> None:
    """Check one call. size: the standard deviation of q and k. slope: a factor of all slopes."""
    generator = torch.Generator().manual_seed(H + 100 * Tq + 1000 * Tk)
    q = size * torch.randn(2, H, Tq, D, generator=generator)
    k = size * torch.randn(2, H, Tk, D, generator=generator)
    v = torch.randn(2, H, Tk, D, generator=generator)
    slopes = slope * (torch.rand(H, generator=generator) * 0.9 + 0.1)
    got = answer.call("causal_attention", q, k, v, slopes)
    expected = attention.attention(q, k, v, impl="reference", alibi_slopes=slopes)
    case = f"B=2, {H=}, {Tq=}, {Tk=}, {D=}, q and k of size {size:g}, slopes of size {slope:g}"
    close(f"causal_attention with {case}", got, expected, tolerance, hint)


@torch.no_grad()
def check_logits(answer):
    """the logits of a small model.MPT with these two functions in it"""

    def their_slopes(n_heads, bias_max=8.0, device=None):
        return answer.call("alibi_slopes", n_heads, bias_max=bias_max)

    def their_attention(q, k, v, *, alibi_slopes, **settings):
        q, k, v = (x.contiguous() for x in (q, k, v))
        return answer.call("causal_attention", q, k, v, alibi_slopes)

    cfg = MPTConfig(d_model=48, n_heads=6, n_layers=3, vocab_size=64, alibi=True)
    mpt = model.MPT(cfg)
    model.init_weights(mpt, seed=6)
    ids = torch.arange(2 * 12).view(2, 12) * 7 % 64  # (B, T)
    what = "the logits of 3 layers with 6 heads"
    expected = mpt(ids)
    with (
        mock.patch.object(model, "alibi_slopes", their_slopes),
        mock.patch.object(model, "attention", their_attention),
    ):
        close(what, mpt(ids), expected, 1e-5)
        cache = mpt.new_cache(2, max_tokens=12, dtype=torch.float32)
        parts = [mpt(part, cache=cache) for part in ids.split([7, 4, 1], dim=1)]
        close(f"{what}, in parts of 7, 4, 1", torch.cat(parts, dim=1), expected, 1e-5)


# --------------------------------------------------------------------------------------------------
# Parameters


def check_count(answer):
    """count_parameters, at last of MPT-7B: 6,649,286,656"""
    compare_count(answer, 11, 4, 1)
    compare_count(answer, 11, 5, 2, ratio=2.5)
    compare_count(answer, 11, 4, 2, rows=7)
    compare_count(answer, 11, 4, 2, biases=True)
    compare_count(answer, 50368, 768, 12, rows=2048, biases=True)
    compare_count(answer, 50432, 4096, 32)  # MPT-7B as released


def compare_count(answer, vocab_size, d_model, n_layers, ratio=4, rows=0, biases=False) -> None:
    """Check one count. The message says how far it is off, and which part has as many."""
    sizes = {"vocab_size": vocab_size, "d_model": d_model, "n_layers": n_layers}
    settings = {"expansion_ratio": ratio, "learned_positions": rows, "biases": biases}
    got = answer.call("count_parameters", *sizes.values(), **settings)
    kind = {"learned_pos_emb": rows > 0, "alibi": rows == 0, "no_bias": not biases}
    cfg = MPTConfig(**sizes, **kind, n_heads=1, expansion_ratio=ratio, max_seq_len=max(rows, 1))
    off = abs(got - flops.n_params(cfg))
    as_many = [name for name, n in flops.params_by_part(cfg).items() if n == off and n > 0]
    like = f", as many as {' or '.join(as_many)} has" if as_many else ""
    assert not off, (
        f"count_parameters, for {sizes | settings}: got {got:,}, "
        f"{off:,} too {'many' if got > flops.n_params(cfg) else 'few'}{like}. The tied output "
        "layer is wte again and counts once; norm_f is a norm, too"
    )

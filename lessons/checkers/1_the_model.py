"""Checks exercise 1: ALiBi's slopes, causal attention, and the number of parameters of an MPT.

`python -m lessons check 1` runs the functions `check_...` one by one.
"""

from unittest import mock

import torch

import attention
import flops
import model
from config import MPTConfig
from lessons.answers import close


def check_slopes(answer):
    """alibi_slopes for 1 to 64 heads"""
    for n_heads, bias_max in ((1, 8), (2, 8), (4, 8), (8, 16), (32, 8), (64, 8)):
        compare_slopes(answer, n_heads, bias_max, "h goes from 1 to n_heads")
    reorder = (
        "take the slopes of the next power of two, the 2nd, 4th, ... first, then 1st, 3rd, ..."
    )
    for n_heads, bias_max in ((3, 8), (5, 8), (6, 8), (12, 16), (20, 8), (56, 8)):
        compare_slopes(answer, n_heads, bias_max, f"not a power of two: {reorder}")


def compare_slopes(answer, n_heads: int, bias_max: float, hint: str) -> None:
    """Check the slopes of one model."""
    got = answer.call("alibi_slopes", n_heads, bias_max=float(bias_max))
    what = f"alibi_slopes({n_heads}, bias_max={bias_max})"
    close(what, got, attention.alibi_slopes(n_heads, bias_max), 1e-6, hint)


# --------------------------------------------------------------------------------------------------
# Attention: each of the first cases has one thing in it that can be wrong


def check_attention(answer):
    """causal_attention, as many queries as keys"""
    compare(answer, 1, 1, 1, 1)
    mask = "all scores are equal here, so query i has the mean of v over the keys j <= i. Put -inf"
    compare(answer, 1, 3, 3, 2, size=0, slope=0, hint=f"{mask} on the scores before the softmax")
    bias = "q is 0 here, so only the bias is left: -slope * (i - j), less for distant keys"
    compare(answer, 1, 3, 3, 2, size=0, hint=bias)
    scale = "there is no bias here: divide q k^T by sqrt(D), softmax over the keys"
    compare(answer, 2, 5, 5, 4, slope=0, hint=scale)
    alone = "divide q k^T alone by sqrt(D), not the bias; each head has its own slope"
    compare(answer, 2, 7, 7, 6, hint=alone)
    compare(answer, 4, 65, 65, 16, hint=alone)
    large = "exp(89) is inf in float32: subtract the largest score of a query before exp"
    compare(answer, 2, 9, 9, 4, size=15, tolerance=1e-3, hint=large)


def check_attention_on_a_cache(answer):
    """causal_attention, fewer queries than keys"""
    hint = "the queries are the last Tq of the Tk positions: the mask and the bias count from there"
    for H, Tq, Tk, D in [(1, 1, 2, 1), (2, 2, 3, 2), (3, 1, 9, 4), (3, 4, 20, 8)]:
        compare(answer, H, Tq, Tk, D, hint=hint)


def compare(answer, H, Tq, Tk, D, size=1.0, slope=1.0, tolerance=1e-5, hint="") -> None:
    """Check one call. size: the standard deviation of q and k. slope: a factor of all slopes."""
    B = 2
    generator = torch.Generator().manual_seed(H + 100 * Tq + 1000 * Tk)
    q = size * torch.randn(B, H, Tq, D, generator=generator)
    k = size * torch.randn(B, H, Tk, D, generator=generator)
    v = torch.randn(B, H, Tk, D, generator=generator)
    slopes = slope * (torch.rand(H, generator=generator) * 0.9 + 0.1)
    got = answer.call("causal_attention", q, k, v, slopes)
    expected = attention.attention(q, k, v, impl="reference", alibi_slopes=slopes)
    case = f"{B=}, {H=}, {Tq=}, {Tk=}, {D=}, q and k of size {size:g}, slopes of size {slope:g}"
    close(f"causal_attention with {case}", got, expected, tolerance, hint)


def check_logits(answer):
    """the logits of a small model.MPT with these two functions in it"""

    def their_slopes(n_heads, bias_max=8.0, device=None):
        """The answer's slopes, for attention.alibi_slopes."""
        return answer.call("alibi_slopes", n_heads, bias_max=bias_max)

    def their_attention(q, k, v, *, alibi_slopes, **settings):
        """The answer's attention, for attention.attention."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        return answer.call("causal_attention", q, k, v, alibi_slopes)

    for n_heads, n_layers in ((1, 1), (6, 3)):
        cfg = MPTConfig(
            d_model=n_heads * 8, n_heads=n_heads, n_layers=n_layers, vocab_size=64, alibi=True
        )
        mpt = model.MPT(cfg)
        model.init_weights(mpt, seed=n_heads)
        ids = torch.arange(2 * 12).view(2, 12) * 7 % 64  # (B, T)
        what = f"the logits of {n_layers} layers with {n_heads} heads"
        with torch.no_grad():
            expected = mpt(ids)
            with (
                mock.patch.object(model, "alibi_slopes", their_slopes),
                mock.patch.object(model, "attention", their_attention),
            ):
                close(what, mpt(ids), expected, 1e-5)
                cache = mpt.empty_cache(2, max_tokens=12, dtype=torch.float32)
                parts = [mpt(part, cache=cache) for part in ids.split([7, 4, 1], dim=1)]
                close(f"{what}, in parts of 7, 4, 1", torch.cat(parts, dim=1), expected, 1e-5)


# --------------------------------------------------------------------------------------------------
# Parameters


def check_count(answer):
    """count_parameters, at last of MPT-7B: 6,649,286,656"""
    for d_model, n_layers, ratio, rows, biases in (
        (4, 1, 4, 0, False),
        (4, 2, 3, 0, False),
        (5, 2, 2.5, 0, False),
        (4, 2, 4, 7, False),
        (4, 2, 4, 0, True),
        (5, 3, 2.5, 9, True),
    ):
        compare_count(answer, 11, d_model, n_layers, ratio, rows, biases)
    for d_model, n_layers in ((768, 12), (2048, 24), (4096, 32)):
        compare_count(answer, 50368, d_model, n_layers, 4, 2048, True)
    compare_count(answer, 50432, 4096, 32, 4, 0, False)  # MPT-7B as released


def compare_count(answer, vocab_size, d_model, n_layers, ratio, rows, biases) -> None:
    """Check one count. The message says how far it is off, and which part has as many."""
    cfg = MPTConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_heads=1,
        n_layers=n_layers,
        expansion_ratio=ratio,
        max_seq_len=max(rows, 1),
        learned_pos_emb=rows > 0,
        alibi=rows == 0,
        no_bias=not biases,
    )
    expected = flops.n_params(cfg)
    settings = {"expansion_ratio": ratio, "learned_positions": rows, "biases": biases}
    got = answer.call("count_parameters", vocab_size, d_model, n_layers, **settings)
    assert type(got) is int, f"count_parameters: expected an int, got {got!r}"
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    case = f"count_parameters({vocab_size=}, {d_model=}, {n_layers=}, {shown})"
    off = abs(got - expected)
    as_many = [name for name, n in flops.params_by_part(cfg).items() if n == off and n > 0]
    like = f", as many as {' or '.join(as_many)} has" if as_many else ""
    hint = "The tied output layer is wte again and counts once; norm_f is a norm, too"
    amount = f"{off:,} too {'many' if got > expected else 'few'}{like}"
    assert got == expected, f"{case}: got {got:,}, {amount}. {hint}"

"""Checks exercise 1: ALiBi's slopes, causal attention, and the number of parameters of an MPT.

`python -m lessons check 1` runs the functions `check_...` one by one. A wrong answer is compared
with what typical mistakes give, to say which one it may be.
"""

import math
from unittest import mock

import torch

import attention
import flops
import model
from config import MPTConfig
from lessons.answers import Wrong, close, equal

# Mistakes in attention, as arguments of `attend`, and what to say. The first two show only if
# there are fewer queries than keys.
MISTAKES = [
    (
        {"mask": "top left"},
        "this is what comes if query 0 stands at position 0: the queries are the last Tq of the "
        "Tk positions",
    ),
    ({"first": 0}, "the mask is right, but the distances are counted as if query 0 stood at 0"),
    ({"mask": "none"}, "this is what comes without the mask: a query must not see later keys"),
    (
        {"mask": "after"},
        "this is what comes if the mask is put on after the softmax: the weights that are left no "
        "longer sum to 1, so put -inf on the scores",
    ),
    ({"mask": "strict"}, "this is what comes if a query does not see its own key (j = i)"),
    ({"slope": 1.0}, "this is what comes if distant keys gain: the bias is -slope * (i - j)"),
    ({"slope": 0.0}, "this is what comes without the bias -slope * (i - j)"),
    ({"scale": 1.0}, "this is what comes if q k^T is not divided by sqrt(D)"),
    ({"scale": "1 / D"}, "this is what comes if q k^T is divided by D: divide by sqrt(D)"),
    ({"scaled_bias": True}, "the bias was divided by sqrt(D), too: divide q k^T alone"),
    ({"dim": -2}, "this is what comes if the softmax is over the queries: it is over the keys"),
]


def attend(q, k, v, slopes, mask="causal", slope=-1.0, scale=None, dim=-1, **more):
    """Causal attention with ALiBi, or what comes of one of the MISTAKES."""
    n_queries, n_keys, head_dim = q.shape[2], k.shape[2], q.shape[3]
    scale = {None: head_dim**-0.5, "1 / D": 1 / head_dim}.get(scale, scale)
    i = torch.arange(n_keys - n_queries, n_keys)[:, None]
    j = torch.arange(n_keys)
    row = torch.arange(n_queries)[:, None]
    hidden = {"none": j < 0, "strict": j >= i, "top left": j > row}.get(mask, j > i)
    distance = (row if "first" in more else i) - j
    bias = slope * slopes[:, None, None] * distance
    if more.get("scaled_bias"):
        bias = bias * scale
    scores = q @ k.mT * scale + bias
    if mask == "after":
        return torch.softmax(scores, dim).masked_fill(hidden, 0) @ v
    return torch.softmax(scores.masked_fill(hidden, -math.inf), dim) @ v


def compare(answer, q, k, v, slopes, tolerance: float, case: str) -> None:
    """Check one call of the answer's attention. Wrong with a hint if it is a known mistake."""
    got = answer.call("causal_attention", q, k, v, slopes)
    expected = attention.attention(q, k, v, impl="reference", alibi_slopes=slopes)
    try:
        close("causal_attention", got, expected, tolerance, case)
    except Wrong as error:
        hint = attention_hint(got, q, k, v, slopes) if is_like(got, expected) else ""
        raise Wrong(f"{error}{hint}") from None


def is_like(got, expected) -> bool:
    """Whether it is a tensor of the expected shape and dtype, so that only its values are wrong."""
    is_tensor = isinstance(got, torch.Tensor)
    return is_tensor and got.shape == expected.shape and got.dtype == expected.dtype


def attention_hint(got, q, k, v, slopes) -> str:
    """What may be wrong with this output; empty if it is none of the known mistakes."""
    for settings, hint in MISTAKES:
        wrong = attend(q, k, v, slopes, **settings)
        if torch.allclose(got, wrong, atol=1e-5, equal_nan=True):
            return f"\n{hint}"
    if not got.isfinite().all():
        return "\nexp(89) is inf in float32: subtract the largest score of a query before exp"
    return ""


def random_inputs(B: int, H: int, Tq: int, Tk: int, D: int, size: float = 1.0) -> tuple:
    """(q, k, v, slopes, the shapes in words). size: the standard deviation of q and k."""
    generator = torch.Generator().manual_seed(B + 10 * H + 100 * Tq + 1000 * Tk)
    q = size * torch.randn(B, H, Tq, D, generator=generator)
    k = size * torch.randn(B, H, Tk, D, generator=generator)
    v = torch.randn(B, H, Tk, D, generator=generator)
    slopes = torch.rand(H, generator=generator) * 0.9 + 0.1
    lengths = f"T={Tq}" if Tq == Tk else f"{Tq=}, {Tk=}"
    return q, k, v, slopes, f"{B=}, {H=}, {lengths}, {D=}"


# --------------------------------------------------------------------------------------------------
# The parts


def check_slopes_of_powers_of_two(answer):
    """alibi_slopes for 1, 2, 4, 8, 32, 64 heads"""
    for n_heads, bias_max in ((1, 8), (2, 8), (4, 8), (8, 8), (32, 8), (64, 8), (8, 16)):
        compare_slopes(answer, n_heads, bias_max)


def check_slopes_of_any_number(answer):
    """alibi_slopes for 3, 5, 6, 12, 20, 56 heads"""
    for n_heads, bias_max in ((3, 8), (5, 8), (6, 8), (12, 8), (20, 8), (56, 8), (12, 16)):
        compare_slopes(answer, n_heads, bias_max)


def compare_slopes(answer, n_heads: int, bias_max: float) -> None:
    """Check the slopes of one model. Wrong with a hint if it is a known mistake."""
    got = answer.call("alibi_slopes", n_heads, bias_max=float(bias_max))
    expected = attention.alibi_slopes(n_heads, bias_max)
    try:
        close("alibi_slopes", got, expected, 1e-6, f"{n_heads=}, {bias_max=}")
    except Wrong as error:
        hint = slopes_hint(got, n_heads, bias_max) if is_like(got, expected) else ""
        raise Wrong(f"{error}{hint}") from None


def slopes_hint(got, n_heads: int, bias_max: float) -> str:
    """What may be wrong with these slopes, (H,); empty if it is none of the known mistakes."""
    n = 2 ** (n_heads - 1).bit_length()
    h = torch.arange(1, n + 1).float()
    slopes = 2 ** (-h * bias_max / n)
    h = h[:n_heads]
    odd_first = torch.cat([slopes[0::2], slopes[1::2]])[:n_heads]
    expected = attention.alibi_slopes(n_heads, bias_max)
    wrong = [
        (2 ** (-h * bias_max / n_heads), "these are 2^(-h * bias_max / n_heads): see the stub"),
        (slopes[:n_heads], "these are the first slopes of the next power of two, not reordered"),
        (odd_first, "the 1st, 3rd, 5th ... come first here: MPT puts the 2nd, 4th ... first"),
        (2 ** (-(h - 1) * bias_max / n_heads), "h begins at 1, not at 0"),
        (expected.flip(0), "the order is reversed"),
        (attention.alibi_slopes(n_heads), "these do not depend on bias_max"),
    ]
    for value, hint in wrong:
        if torch.allclose(got, value, atol=1e-6):
            return f"\n{hint}"
    return ""


def check_attention(answer):
    """causal_attention, as many queries as keys"""
    sizes = [(1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 3, 2), (1, 2, 4, 4), (2, 3, 7, 6), (2, 4, 65, 16)]
    for B, H, T, D in sizes:
        *inputs, case = random_inputs(B, H, T, T, D)
        compare(answer, *inputs, 1e-5, case)


def check_large_scores(answer):
    """causal_attention with scores of hundreds, which exp alone cannot take"""
    *inputs, case = random_inputs(1, 2, 9, 9, 4, size=15.0)
    compare(answer, *inputs, 1e-3, f"{case}, with q and k 15 times as large")


def check_attention_on_a_cache(answer):
    """causal_attention, fewer queries than keys"""
    for B, H, Tq, Tk, D in [(1, 1, 1, 2, 1), (1, 2, 2, 3, 2), (2, 3, 1, 9, 4), (2, 3, 4, 20, 8)]:
        *inputs, case = random_inputs(B, H, Tq, Tk, D)
        compare(answer, *inputs, 1e-5, case)


def check_logits(answer):
    """the logits of a small model.MPT with these two functions in it"""

    def their_slopes(n_heads, bias_max=8.0, device=None):
        """The answer's slopes, for attention.alibi_slopes."""
        slopes = answer.call("alibi_slopes", n_heads, bias_max=bias_max)
        close("alibi_slopes", slopes, torch.zeros(n_heads), math.inf)  # its kind, shape and dtype
        return slopes

    def their_attention(q, k, v, *, alibi_slopes, **settings):
        """The answer's attention, for attention.attention."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        y = answer.call("causal_attention", q, k, v, alibi_slopes)
        close("causal_attention", y, q, math.inf)
        return y

    for n_heads, n_layers in ((1, 1), (4, 2), (6, 3)):
        cfg = MPTConfig(
            d_model=n_heads * 8, n_heads=n_heads, n_layers=n_layers, vocab_size=64, alibi=True
        )
        mpt = model.MPT(cfg)
        model.init_weights(mpt, seed=n_heads)
        ids = torch.arange(2 * 12).view(2, 12) * 7 % 64  # (B, T)
        case = f"{n_heads=}, {n_layers=}, {tuple(ids.shape)} ids"
        with torch.no_grad():
            expected = mpt(ids)
            with (
                mock.patch.object(model, "alibi_slopes", their_slopes),
                mock.patch.object(model, "attention", their_attention),
            ):
                got = mpt(ids)
                close("the logits", got, expected, 1e-5, case)
                cache = mpt.empty_cache(2, max_tokens=12, dtype=torch.float32)
                parts = [mpt(part, cache=cache) for part in ids.split([7, 4, 1], dim=1)]
                got = torch.cat(parts, dim=1)
                close("the logits", got, expected, 1e-5, f"{case} in parts of 7, 4 and 1 tokens")


def check_count_of_small_models(answer):
    """count_parameters of small models"""
    for d_model, n_layers, ratio, rows, biases in (
        (4, 1, 4, 0, False),
        (4, 2, 4, 0, False),
        (4, 2, 3, 0, False),
        (5, 2, 2.5, 0, False),
        (4, 2, 4, 7, False),
        (4, 2, 4, 0, True),
        (5, 3, 2.5, 9, True),
    ):
        compare_count(answer, 11, d_model, n_layers, ratio, rows, biases)


def check_count_of_the_sizes_of_mpt(answer):
    """count_parameters of MPT's sizes and of MPT-7B: 6,649,286,656"""
    for d_model, n_layers in ((768, 12), (1024, 24), (1536, 24), (2048, 24), (4096, 32)):
        compare_count(answer, 50368, d_model, n_layers, 4, 2048, True)
        compare_count(answer, 50368, d_model, n_layers, 4, 0, False)
    compare_count(answer, 50432, 4096, 32, 4, 0, False)  # MPT-7B as released


def compare_count(answer, vocab_size, d_model, n_layers, ratio, rows, biases) -> None:
    """Check one count. Wrong with a hint if it is a known mistake."""
    settings = {
        "expansion_ratio": ratio,
        "learned_positions": rows,
        "biases": biases,
    }
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
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    case = f"{vocab_size=}, {d_model=}, {n_layers=}, {shown}"
    got = answer.call("count_parameters", vocab_size, d_model, n_layers, **settings)
    try:
        equal("count_parameters", got, expected, case)
    except Wrong as error:
        is_number = isinstance(got, int | float) and math.isfinite(got)
        hint = count_hint(got, expected, cfg) if is_number else ""
        raise Wrong(f"{error}{hint}") from None


def count_hint(got, expected: int, cfg: MPTConfig) -> str:
    """How far off a count is, and what may be wrong with it if it is a known mistake."""
    if got == expected:
        return "\nthe value is right, but it must be an int"
    d, parts = cfg.d_model, flops.params_by_part(cfg)
    norm = (1 if cfg.no_bias else 2) * d
    by_difference = {
        parts["wte"]: "a tied output layer is the embedding again, with no weight of its own",
        -cfg.n_layers * norm: "each block has two norms",
        -norm: "norm_f, after the last block, is a norm like the two in each block",
        -parts["norms"]: "the norms have weights too: two norms a block, and norm_f",
        -parts["out_proj"]: "each block has an out_proj after attention",
        -2 * parts["out_proj"]: "Wqkv gives q, k and v: its weight has 3 d rows",
        -parts["wpe"]: "the table of learned positions has a row of d numbers for each position",
        -parts["biases"]: "biases=True: each linear layer and each norm has one",
    }
    size = abs(got - expected)
    name = {d: " = d_model", parts["wte"]: " = vocab_size * d_model"}.get(size, "")
    hint = by_difference.get(got - expected)
    amount = f"\n{size:,}{name} too {'many' if got > expected else 'few'}"
    return f"{amount}: {hint}" if hint else amount


if __name__ == "__main__":
    print(__doc__)

"""A solution of exercise 1: ALiBi's slopes, causal attention, and an MPT's parameters."""

import math

import torch


def alibi_slopes(n_heads, bias_max=8.0):
    """The slope of each head, (n_heads,) float32."""
    # n: n_heads rounded up to a power of two. (n_heads - 1).bit_length() is how often n_heads - 1
    # can be halved: 4 for 9 to 16 heads. Integers have no rounding to worry about.
    n = 2 ** (n_heads - 1).bit_length()
    h = torch.arange(1, n + 1, dtype=torch.float32)
    slopes = 2 ** (-h * bias_max / n)  # (n,)
    if n == n_heads:
        return slopes

    # Index 0 is the first slope, so the 2nd, 4th, ... begin at index 1.
    reordered = torch.cat([slopes[1::2], slopes[0::2]])
    return reordered[:n_heads]


def causal_attention(q, k, v, slopes):
    """softmax(q k^T / sqrt(D) + bias) v, (B, H, Tq, D) float32."""
    D = q.shape[-1]
    Tq, Tk = q.shape[2], k.shape[2]

    # A product for each row and head at once: (Tq, D) @ (D, Tk).
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # (B, H, Tq, Tk)

    # The positions of the queries as a column, those of the keys as a row: i - j is a table. The
    # queries are the last Tq positions, so the first of them stands at Tk - Tq.
    i = torch.arange(Tk - Tq, Tk)[:, None]  # (Tq, 1)
    j = torch.arange(Tk)[None, :]  # (1, Tk)
    bias = -slopes[:, None, None] * (i - j)  # (H, Tq, Tk); it is the same in each row of the batch

    # The mask comes before the softmax: exp(-inf) = 0, so what is left still sums to 1. A query
    # always sees its own key (j = i), so no line of scores is -inf from end to end.
    scores = (scores + bias).masked_fill(j > i, -math.inf)
    return torch.softmax(scores, dim=-1) @ v  # over the keys


def count_parameters(
    vocab_size, d_model, n_layers, expansion_ratio=4, learned_positions=0, biases=False
):
    """The number of parameters of an MPT with tied embeddings, an int."""
    d = d_model
    hidden = int(d * expansion_ratio)
    matrices = 3 * d * d + d * d + 2 * d * hidden  # Wqkv, out_proj, up_proj and down_proj
    norms = 2 * d
    layer_biases = 3 * d + d + hidden + d + norms  # in the same order

    layer = matrices + norms
    norm_f = d
    if biases:
        layer += layer_biases
        norm_f += d

    # The output layer is wte again: it is not counted twice.
    embeddings = (vocab_size + learned_positions) * d
    return embeddings + n_layers * layer + norm_f

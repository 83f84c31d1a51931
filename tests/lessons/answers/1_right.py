"""Correct: slopes by the ALiBi paper's recursion, attention key by key with a running softmax,
parameters as a sum over the shapes of the tensors."""

import math

import numpy
import torch


def alibi_slopes(n_heads, bias_max=8.0):
    if math.log2(n_heads).is_integer():
        first = 2.0 ** (-bias_max / n_heads)
        return torch.tensor([first ** (h + 1) for h in range(n_heads)], dtype=torch.float32)
    smaller = 2 ** int(math.log2(n_heads))
    between = alibi_slopes(2 * smaller, bias_max)[::2]
    return torch.cat([alibi_slopes(smaller, bias_max), between[: n_heads - smaller]])


def causal_attention(q, k, v, slopes):
    B, H, Tq, D = q.shape
    Tk = k.shape[2]
    position = torch.arange(Tk - Tq, Tk)
    highest = torch.full((B, H, Tq), -1e30)
    total = torch.zeros(B, H, Tq)
    out = torch.zeros(B, H, Tq, D)
    for j in range(Tk):
        score = torch.einsum("bhqd,bhd->bhq", q, k[:, :, j]) * D**-0.5
        score = score + slopes.view(1, H, 1) * (j - position[-1])  # plus a constant per query
        score = torch.where(position >= j, score, torch.tensor(-1e30))
        new = torch.maximum(highest, score)
        keep = torch.exp(highest - new)
        weight = torch.exp(score - new) * (position >= j)
        total = total * keep + weight
        out = out * keep[..., None] + weight[..., None] * v[:, :, j, None]
        highest = new
    return out / total[..., None]


def count_parameters(
    vocab_size, d_model, n_layers, expansion_ratio=4, learned_positions=0, biases=False
):
    hidden = int(d_model * expansion_ratio)
    linear = [(3 * d_model, d_model), (d_model, d_model), (hidden, d_model), (d_model, hidden)]
    shapes = [(vocab_size, d_model), (learned_positions, d_model)]
    norms = 1
    for _ in range(n_layers):
        shapes += linear
        shapes += [(out,) for out, _ in linear] if biases else []
        norms += 2
    shapes += [(d_model,)] * norms * (2 if biases else 1)
    return sum(int(numpy.prod(shape, dtype=numpy.int64)) for shape in shapes)

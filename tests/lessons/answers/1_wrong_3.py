"""Wrong: the bias has the wrong sign, so distant keys count more.

Refused by check_attention, check_large_scores, check_attention_on_a_cache, check_logits.
"""

import math

import torch


def alibi_slopes(n_heads: int, bias_max: float = 8.0) -> torch.Tensor:
    n = 2 ** (n_heads - 1).bit_length()
    h = torch.arange(1, n + 1, dtype=torch.float32)
    slopes = 2 ** (-h * bias_max / n)
    if n == n_heads:
        return slopes
    reordered = torch.cat([slopes[1::2], slopes[0::2]])
    return reordered[:n_heads]


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor
) -> torch.Tensor:
    D = q.shape[-1]
    Tq, Tk = q.shape[2], k.shape[2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)
    i = torch.arange(Tk - Tq, Tk)[:, None]
    j = torch.arange(Tk)[None, :]
    bias = slopes[:, None, None] * (i - j)
    scores = (scores + bias).masked_fill(j > i, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def count_parameters(
    vocab_size: int,
    d_model: int,
    n_layers: int,
    expansion_ratio: float = 4,
    learned_positions: int = 0,
    biases: bool = False,
) -> int:
    d = d_model
    hidden = int(d * expansion_ratio)
    matrices = 3 * d * d + d * d + 2 * d * hidden
    norms = 2 * d
    layer_biases = 3 * d + d + hidden + d + norms
    layer = matrices + norms
    norm_f = d
    if biases:
        layer += layer_biases
        norm_f += d
    embeddings = (vocab_size + learned_positions) * d
    return embeddings + n_layers * layer + norm_f

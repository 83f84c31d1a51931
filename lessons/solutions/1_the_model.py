"""Exercise 1: ALiBi's slopes, causal attention, and the number of parameters of an MPT.

Write the three functions. `python -m lessons check 1` then checks each, and the first two in place
of those of a small model.MPT: the same logits to 1e-5.

Use PyTorch as you like, and none of the project's own modules. attention.py and
flops.py hold a solution: read them after your own work.
"""

import math

import torch


def alibi_slopes(n_heads: int, bias_max: float = 8.0) -> torch.Tensor:
    """The slope of each head, (n_heads,) float32.

    If n_heads is a power of two: 2^(-h * bias_max / n_heads) for h = 1 ... n_heads.

    If not: take the slopes of the next power of two. Put the 2nd, 4th, 6th, ... of them first,
    then the 1st, 3rd, 5th, ..., and keep the first n_heads.
    """
    # --- in the stub: raise NotImplementedError
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
    # ---


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D) + bias) v, (B, H, Tq, D) float32.

    q       (B, H, Tq, D) float32
    k, v    (B, H, Tk, D) float32, Tk >= Tq
    slopes  (H,) float32, one for each head

    The queries are the last Tq of the Tk positions: in training Tq = Tk, and on a cache the query
    of the newest token, Tq = 1, stands at position Tk - 1. The bias of a query at position i and a
    key at position j is -slope * (i - j) if j <= i; if j > i, the query must not see the key.
    """
    # --- in the stub: raise NotImplementedError
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
    # ---


def count_parameters(
    vocab_size, d_model, n_layers, expansion_ratio=4, learned_positions=0, biases=False
):
    """The number of parameters of an MPT with tied embeddings, an int.

    The parts: wte (word token embedding); n_layers blocks, each with norm_1, Wqkv, out_proj,
    norm_2, up_proj, down_proj; norm_f. There are as many heads of keys and values as of queries.

    expansion_ratio     the hidden width of the feed-forward is int(d_model * expansion_ratio)
    learned_positions   rows of wpe (word position embedding, the learned vector of each
                        position); 0: no such table
    biases              True: each linear layer has a bias as long as its output, and each norm
                        has one beside its weight
    """
    # --- in the stub: raise NotImplementedError
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
    # ---

"""Exercise 1: ALiBi's slopes, causal attention, and the number of parameters of an MPT.

Write the three functions. `python -m lessons check 1` then checks each, and the first two in place
of those of a small model.MPT: the same logits to 1e-5.

Use PyTorch as you like, and none of the project's own modules. attention.py and
flops.py hold a solution: read them after your own work.
"""

import torch


def alibi_slopes(n_heads: int, bias_max: float = 8.0) -> torch.Tensor:
    """The slope of each head, (n_heads,) float32.

    If n_heads is a power of two: 2^(-h * bias_max / n_heads) for h = 1 ... n_heads.

    If not: take the slopes of the next power of two. Put the 2nd, 4th, 6th, ... of them first,
    then the 1st, 3rd, 5th, ..., and keep the first n_heads.
    """
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError

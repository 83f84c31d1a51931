"""FlexAttention: PyTorch compiles a kernel for the bias, and skips blocks of hidden scores.

The bias is a function of one score and its place; which keys a query sees is another one, from
which PyTorch makes a table of the 128 x 128 blocks that are needed at all. On GPUs only: it has no
backward on a CPU.
"""

import functools

import torch


def flex_attention(q, k, v, rule):
    """q, k and v (B, H, T, D) -> (B, H, T, D), by the `attention.ScoreRule`, without dropout."""

    def change(score, b, h, i, j):
        """The score of query i and key j in row b, head h, with softcap and bias."""
        if rule.softcap is not None:
            score = rule.softcap * torch.tanh(score / rule.softcap)
        return score if rule.slopes is None else score - rule.slopes[h] * (i - j).abs()

    mask_of = cached_block_mask if rule.sequence_ids is None else block_mask
    return compiled_flex()(
        q,
        k,
        v,
        score_mod=None if rule.slopes is None and rule.softcap is None else change,
        block_mask=mask_of(k.shape[2], rule.causal, rule.window, rule.sequence_ids, q.device),
        scale=rule.scale,
    )


@functools.cache
def compiled_flex():
    """PyTorch's flex_attention, compiled once: uncompiled, it would keep all T x T scores."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    return torch.compile(flex)


def block_mask(n_tokens, causal, window, sequence_ids, device):
    """FlexAttention's table of the blocks of scores that are needed, or None if all are."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(b, h, i, j):
        """Whether query i sees key j in row b."""
        seen = (j <= i) | (not causal)
        if window is not None:
            seen = seen & (i - j <= window)
        if sequence_ids is not None:
            seen = seen & (sequence_ids[b, i] == sequence_ids[b, j])
        return seen

    if not causal and window is None and sequence_ids is None:
        return None
    rows = None if sequence_ids is None else len(sequence_ids)
    return create_block_mask(sees, rows, None, n_tokens, n_tokens, device=device)


# By shape, for all layers and steps. Not of documents, which are other tensors in each batch.
cached_block_mask = functools.lru_cache(maxsize=4)(block_mask)

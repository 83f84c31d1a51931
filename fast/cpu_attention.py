"""Attention by blocks of queries, with a backward written by hand: the fast way on a CPU.

It computes what the loop in `attention.blockwise_attention` does: for a block of 64 queries at a
time, softmax(q k^T * scale + bias) v over the keys that the block sees. Autograd, which
differentiates that loop, makes a whole dk and dv of each block, mostly zeros, and adds them up.
Here each block adds to the part that it sees. With g for the gradient of the output:

    dv = probs^T g                  d probs  = g v^T
    dq = d scores k * scale         d scores = probs * (d probs - rowsum(probs * d probs))
    dk = d scores^T q * scale
"""

import math

import torch

# Queries of a block; in 16 bits twice as many. Small blocks skip more of the future, large ones
# multiply faster. These are within 3 % of the best on the CPU of bench/results/cpu.md, for 256 to
# 2,048 tokens.
BLOCK = 64


def suits(rule) -> bool:
    """Whether the backward below is that of an `attention.ScoreRule`; else autograd does it."""
    learns_slopes = rule.slopes is not None and rule.slopes.requires_grad
    return rule.dropout_p == 0 and rule.softcap is None and not learns_slopes


def block_rows(dtype) -> int:
    """Queries of a block."""
    return BLOCK if dtype.itemsize > 2 else 2 * BLOCK


def query_blocks(q, k, window=None):
    """(slice of the queries, slice of the keys that they see) of each block."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    past = n_keys - n_queries  # keys before the first query
    rows = block_rows(q.dtype)
    for begin in range(0, n_queries, rows):
        end = min(begin + rows, n_queries)
        first_key = 0 if window is None else max(0, past + begin - window)
        yield slice(begin, end), slice(first_key, past + end)


def bias_shape(q, k, rule) -> tuple[int, int]:
    """(rows, columns) of the bias of the last block, which has all biases that there are.

    A bias depends on the distance i - j alone. So that of an earlier block, which sees fewer keys,
    is the right part of it. For blocks of one query and four keys:

        last block    -3 -2 -1  0
        the second          -1  0

    Its columns: with a window, the keys that the block sees; else with ALiBi all keys; else only
    those of the block itself, whose future is hidden.
    """
    rows = min(q.shape[2], block_rows(q.dtype))
    if rule.window is not None:
        return rows, min(k.shape[2], rows + rule.window)
    return rows, rows if rule.slopes is None else k.shape[2]


def blockwise_attention(q, k, v, bias, rule):
    """q (B, H, Tq, D), k and v (B, H, Tk, D) -> (B, H, Tq, D). Differentiable once.

    bias: of the last block, (H or none, *`bias_shape`). rule: an `attention.ScoreRule` that this
    backward `suits`. Under autocast q, k and v are in its dtype.
    """
    needs_grad = torch.is_grad_enabled()
    blocks = list(query_blocks(q, k, rule.window))
    with torch.autocast(q.device.type, enabled=False):  # forward and backward in one dtype
        return Blockwise.apply(q, k, v, bias, rule.scale, rule.sequence_ids, blocks, needs_grad)


class Blockwise(torch.autograd.Function):
    """The autograd node of `blockwise_attention`."""

    @staticmethod
    def forward(ctx, q, k, v, bias, scale, sequence_ids, blocks, needs_grad):
        """The output (B, H, Tq, D), laid out as (B, Tq, H, D).

        needs_grad: whether autograd is on for the caller. In here it is always off.
        """
        B, H, n_queries, D = q.shape
        n_keys = k.shape[2]
        out = q.new_empty(B, n_queries, H, D).transpose(1, 2)
        q = q.reshape(-1, n_queries, D) * scale  # (B * H, Tq, D)
        k = k.reshape(-1, n_keys, D)
        v = v.reshape(-1, n_keys, D)
        kept = []
        for queries, keys in blocks:
            scores = torch.bmm(q[:, queries], k[:, keys].mT)  # (B * H, rows, keys)
            add_bias(scores.view(B, H, *scores.shape[1:]), bias, sequence_ids, keys)
            probs = torch.softmax(scores, dim=-1, out=scores)
            out[:, :, queries] = torch.bmm(probs, v[:, keys]).view(B, H, -1, D)
            if needs_grad:
                kept.append(probs)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.blocks = blocks
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        """grad_out (B, H, Tq, D) -> dq, dk, dv, as q, k and v."""
        q, k, v, *kept = ctx.saved_tensors  # q is scaled already
        B, H, n_queries, D = grad_out.shape
        grad_out = grad_out.reshape(q.shape)
        dq = q.new_empty(B, n_queries, H, D).transpose(1, 2)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        for (queries, keys), probs in zip(ctx.blocks, kept, strict=True):
            g = grad_out[:, queries]  # (B * H, rows, D)
            dv[:, keys] += torch.bmm(probs.mT, g)
            dprobs = torch.bmm(g, v[:, keys].mT)
            # PyTorch's own kernel for the backward of softmax, here in place
            dscores = torch._softmax_backward_data(
                dprobs, probs, -1, probs.dtype, grad_input=dprobs
            )
            dk[:, keys] += torch.bmm(dscores.mT, q[:, queries])
            block_dq = torch.bmm(dscores, k[:, keys]).mul_(ctx.scale)
            dq[:, :, queries] = block_dq.view(B, H, -1, D)
        dk = dk.view(B, H, -1, D)
        dv = dv.view(B, H, -1, D)
        return dq, dk, dv, None, None, None, None, None


def add_bias(scores, bias, sequence_ids, keys):
    """Add the bias to the scores (B, H, rows, keys) of a block, in place; hide other documents."""
    rows, n_keys = scores.shape[2:]
    bias = bias[..., -rows:, -n_keys:]
    scores[..., -bias.shape[-1] :] += bias
    if sequence_ids is not None:
        key_ids = sequence_ids[:, None, None, keys]
        query_ids = key_ids[..., -rows:].mT
        scores.masked_fill_(query_ids != key_ids, -math.inf)

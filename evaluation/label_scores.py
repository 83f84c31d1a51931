"""The log-probability of each label, without all logits in memory: what scoring asks a model for.

    log_probs, greedy = model(ids, labels, head=score_labels)

Both are shaped like labels, (B, T): log_probs in fp32 (fp64 for fp64 inputs), greedy whether the
label is the most likely token; 0 and False where the label is IGNORE. A label beyond the vocabulary
has NaN. Of equal logits the first is the most likely.
"""

import math

import torch
import torch.nn.functional as F

from attention import autocast_dtype
from loss import IGNORE, at_least_fp32, chunk_rows, soft_capped
from tensor_parallel import SplitMPT


@torch.no_grad()
def score_labels(model, x, labels):
    """A head for `MPT.forward`: x (B, T, d_model) are the hidden states of the model."""
    flat_x, flat_labels = x.flatten(0, -2), labels.flatten()
    if isinstance(model, SplitMPT):
        log_probs, greedy = model.score(flat_x, flat_labels)
    elif x.device.type == "cpu":
        log_probs, greedy = score_counted(model, flat_x, flat_labels)
    else:
        log_probs, greedy = score_all(model, flat_x, flat_labels)
    return log_probs.view(labels.shape), greedy.view(labels.shape)


def score_all(model, x, labels):
    """x (N, D), labels (N,) -> (N,) each: the obvious way, in chunks of rows.

    On a GPU labels that do not count are scored, too: to leave them out, the host would have to
    wait for the device, to learn how many they are.
    """
    exact = at_least_fp32(x)
    weight = model.output_weight.to(autocast_dtype(x))  # cast once, not for each chunk
    vocab_size = len(weight)
    cap = model.cfg.final_logit_softcapping
    rows = chunk_rows(vocab_size)
    chunk_log_probs, chunk_greedy = [], []
    for x_chunk, labels_chunk in zip(x.split(rows), labels.split(rows), strict=True):
        logits = F.linear(x_chunk, weight)  # (rows, V)
        if model.logit_scale is not None:
            logits = logits.to(exact) * model.logit_scale
        if cap is not None:
            logits = soft_capped(logits.to(exact), cap)
        chunk_greedy.append(likeliest(logits, labels_chunk))
        index = labels_chunk.clamp(0, vocab_size - 1)
        log_prob = F.log_softmax(logits, -1, dtype=exact).gather(1, index[:, None])[:, 0]  # (rows,)
        chunk_log_probs.append(log_prob.masked_fill(index != labels_chunk, math.nan))
    log_probs = torch.cat(chunk_log_probs).masked_fill(labels == IGNORE, 0)
    return log_probs, torch.cat(chunk_greedy)


def score_counted(model, x, labels):
    """`score_all` for the labels that count, and only those: on a CPU this is the faster way."""
    counted = labels != IGNORE
    log_probs = torch.zeros(labels.shape, dtype=at_least_fp32(x), device=x.device)
    greedy = torch.zeros_like(counted)
    log_probs[counted], greedy[counted] = score_all(model, x[counted], labels[counted])
    return log_probs, greedy


def likeliest(logits, labels):
    """Whether each label (rows,) has the first of the largest logits (rows, V) of its row."""
    if logits.device.type != "cpu":
        return logits.argmax(-1) == labels
    # A CPU takes long for argmax: only where the label has the largest logit.
    index = labels.clamp(0, logits.shape[1] - 1)[:, None]
    greedy = logits.gather(1, index)[:, 0] == logits.amax(-1)
    greedy[greedy.clone()] = logits[greedy].argmax(-1) == labels[greedy]
    return greedy

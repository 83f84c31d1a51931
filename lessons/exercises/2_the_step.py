"""Exercise 2: cross-entropy without all the logits, and five bugs known by their curves.

    python -m lessons check 2

Part 1. Write `chunked_cross_entropy`. The checker compares it with float64, and measures the bytes
    of your tensors: at most a quarter of what the logits of all tokens would take.
Part 2. Lesson 2 draws five training runs, A to E. Each has one bug. Say in BUGS which.

Use PyTorch as you like, with or without autograd, and none of the project's own modules.
"""

import torch

IGNORE = -100  # a label that does not count

# Of each letter one of these causes, in the words of the lesson's list:
#     "gradients not zeroed"    "mean of means"    "schedule too fast"
#     "decay without rate"      "labels not shifted"
BUGS = {"A": None, "B": None, "C": None, "D": None, "E": None}


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of N tokens and its gradients, with the logits of `chunk` tokens at a time.

        logits = hidden @ weight^T                                  (N, V), never all at once
        loss   = sum over tokens that count of  logsumexp(logits) - logits[label]

    hidden  (N, D), float32 or float64
    weight  (V, D), the same dtype
    labels  (N,) int64, each 0 ... V - 1, or IGNORE: such a token adds nothing to the loss, and its
            row of the gradient of hidden is 0
    chunk   the most tokens whose logits may exist at once, at least 1; N need not be a multiple

    Returns (loss, gradient of hidden (N, D), gradient of weight (V, D)), all in hidden's dtype.
    The loss is a tensor of shape (), the sum over the tokens, not the mean.
    """
    raise NotImplementedError

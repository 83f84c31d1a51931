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
# --- in the stub: BUGS = {"A": None, "B": None, "C": None, "D": None, "E": None}
BUGS = {
    # The loss falls to 0, far below what text allows: the model copies the token that it is given.
    # The validation, whose labels are right, says 10 nats.
    "A": "labels not shifted",
    # The loss returns to ln(256) = 5.55, a uniform guess, because the weights shrink to 0.
    "B": "decay without rate",
    # The imports count for three quarters, not for less than a quarter: they are learned
    # better, code worse.
    "C": "mean of means",
    # Learns as usual at first, then stops: in the middle of the run the weights do not change.
    "D": "schedule too fast",
    # The gradient norm never falls below 1: clipping leaves a gradient of norm 1 in .grad, and the
    # next one is added to it. So each step goes on in the direction of the past.
    "E": "gradients not zeroed",
}
# ---


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
    # --- in the stub: raise NotImplementedError
    loss = torch.zeros((), dtype=hidden.dtype)
    grad_hidden = torch.zeros_like(hidden)  # (N, D)
    grad_weight = torch.zeros_like(weight)  # (V, D)

    for begin in range(0, len(hidden), chunk):
        rows = slice(begin, begin + chunk)  # a slice may end beyond the tensor: the last is shorter
        x = hidden[rows]  # (n, D)
        counts = (labels[rows] != IGNORE)[:, None]  # (n, 1)
        label = labels[rows].clamp(min=0)[:, None]  # (n, 1): -100 is no index

        logits = x @ weight.T  # (n, V)
        log_z = logits.logsumexp(-1, keepdim=True)  # (n, 1); it takes out the maximum before exp
        token_losses = log_z - logits.gather(1, label)  # (n, 1)
        loss += (token_losses * counts).sum()

        # The gradient of the logits: softmax - onehot, and 0 for a token that does not count. It is
        # written over the logits, which are not needed any more.
        grad = logits.sub_(log_z).exp_()  # softmax
        grad.scatter_add_(1, label, -torch.ones_like(log_z))
        grad *= counts

        # logits = x W^T, so the chain rule gives two products. Each row of hidden belongs to one
        # chunk; the weight is used by all of them, so its gradients add up.
        grad_hidden[rows] = grad @ weight
        grad_weight += grad.T @ x
    return loss, grad_hidden, grad_weight
    # ---

"""Exercise 7: the forward and backward pass of a LoRA layer, merge and unmerge.

    python -m lessons check 7

A linear layer W with a LoRA adapter computes

    y = W x + bias + s B A x        W (out, in) and bias (out,) are frozen
                                    A (r, in) and B (out, r) are trained; s is a number

Throughout:

    x        (..., in): (N, in) or (B, T, in), float32, bfloat16 or float64
    W, bias  in the dtype of x
    A, B     in float32, or in float64 if x is; never in bfloat16
    s        a float, the argument `scale`

Part 1. `forward`: y, without forming the (out, in) matrix s B A.
Part 2. `backward`: the gradients of x, A and B, without computing the one of W.
Part 3. `merge`: one plain weight. `unmerge`: W back, to within rounding.

The checker compares results, shapes and dtypes, and the memory that parts 1 and 2 use.
Import what you need.
"""


def forward(x, W, bias, A, B, scale):
    """y = W x + bias + scale * B A x, (..., out), in the dtype of x.

    bias may be None. Compute A x and B (A x) in the dtype of A and B: convert x to it, not A and B
    to the dtype of x. Round the update to the dtype of x once it is complete, then add it.

    No tensor as large as W may be made on the way.
    """
    raise NotImplementedError


def backward(dy, x, W, A, B, scale):
    """The gradients (dx, dA, dB), given the gradient dy (..., out) of a loss with respect to y.

    dx (..., in) in the dtype of x; dA (r, in) and dB (out, r) in the dtype of A and B, summed over
    all rows of x. dy has the dtype of x. Do the work on A and B in their dtype, as in `forward`.

    W is frozen, so its gradient, (out, in), must not be computed: no tensor as large as W may be
    made. Work the formulas out on paper, or use autograd on your `forward`.
    """
    raise NotImplementedError


def merge(W, A, B, scale):
    """W + scale * B A, (out, in), in the dtype of W. W itself stays as it is.

    Add in the dtype of A and B, and round to the dtype of W once, at the end.
    """
    raise NotImplementedError


def unmerge(merged, A, B, scale):
    """W from merge(W, A, B, scale), to within rounding, in the dtype of `merged`."""
    raise NotImplementedError

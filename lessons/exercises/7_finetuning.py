"""Exercise 7: the forward and backward pass of a LoRA layer, merge and unmerge, and PEFT's files.

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
Part 4. `read_adapter`: the A, B and s of every layer from the files that PEFT writes. This part is
        for a second hour.

The checker compares results, shapes and dtypes, and the memory that parts 1 and 2 use.
Import what you need: torch, and for part 4 json, math and numpy.
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


def read_adapter(folder):
    """{layer: (A, B, s)} of a folder that PEFT wrote. A and B are float32 tensors, s is a float.

    folder: a string. A layer is named as in the model: "transformer.blocks.0.attn.Wqkv".

    adapter_config.json, some of its settings:

        r             the rank, an integer
        lora_alpha    a number
        use_rslora    true, false, null or not there

        s = lora_alpha / r, with use_rslora lora_alpha / sqrt(r)

    adapter_model.safetensors, from its first byte on:

        8 bytes       n, an unsigned integer, little-endian
        n bytes       JSON: {name of a tensor: {"dtype": "F32", "shape": [4, 64],
                                                "data_offsets": [begin, end]},
                             ...}, perhaps followed by spaces
        the rest      the numbers of the tensors, row by row, little-endian

    begin and end count bytes from the first byte after the JSON. The tensors may come in any order.
    The entry "__metadata__", if there is one, is no tensor. The names are

        base_model.model.transformer.blocks.0.attn.Wqkv.lora_A.weight     (r, in)
        base_model.model.transformer.blocks.0.attn.Wqkv.lora_B.weight     (out, r)

    The dtype is "F32" or "BF16". NumPy has no bfloat16, but a bfloat16 is the upper 16 bits of a
    float32: read 16-bit integers, shift them left by 16 bits in a 32-bit integer, and view these as
    float32. Use json and NumPy; the package `safetensors` is what you rebuild.
    """
    raise NotImplementedError

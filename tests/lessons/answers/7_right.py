"""Another way: autograd for the backward pass, addmm, struct, seeking in the file, torch's bf16."""

import json
import struct

import numpy
import torch


def forward(x, W, bias, A, B, scale):
    y = torch.matmul(x, W.T)
    if bias is not None:
        y = y + bias
    wide = x.to(dtype=B.dtype)
    low = torch.einsum("...i,ri->...r", wide, A)
    return y + torch.einsum("...r,or->...o", low, scale * B).to(y.dtype)


def backward(dy, x, W, A, B, scale):
    x, A, B = (value.detach().requires_grad_() for value in (x, A, B))
    y = forward(x, W.detach(), None, A, B, scale)
    return torch.autograd.grad(y, (x, A, B), dy)


def merge(W, A, B, scale):
    return torch.addmm(W.to(B.dtype), B, A, alpha=scale).to(W.dtype)


def unmerge(merged, A, B, scale):
    return (merged.to(B.dtype) - scale * (B @ A)).to(merged.dtype)


def read_adapter(folder):
    with open(f"{folder}/adapter_config.json") as file:
        config = json.load(file)
    power = 0.5 if config.get("use_rslora", False) else 1
    scale = float(config["lora_alpha"] * config["r"] ** -power)
    pairs = {}
    with open(f"{folder}/adapter_model.safetensors", "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        for name, entry in json.loads(file.read(length)).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            kind = numpy.float32 if entry["dtype"] == "F32" else numpy.int16
            values = torch.from_numpy(numpy.frombuffer(file.read(end - begin), kind).copy())
            if entry["dtype"] == "BF16":
                values = values.view(torch.bfloat16)
            *layer, factor, _ = name.split(".")
            pairs.setdefault(".".join(layer[2:]), {})[factor] = values.float().view(entry["shape"])
    return {layer: (pair["lora_A"], pair["lora_B"], scale) for layer, pair in pairs.items()}

"""Adapters with random weights, to try things with."""

import math
from pathlib import Path

import torch

import lora
from config import MPTConfig, TrainConfig
from model import seeded
from weights import peft
from weights.adapters import Adapter


def write_random(folder: Path, cfg: MPTConfig, settings: TrainConfig, seed: int) -> None:
    """Write a PEFT folder of an adapter with random A and B, which changes what a model writes."""
    tensors = {}
    for name, param in lora.trained_weights(cfg, settings).items():
        values = torch.randn(param.shape, generator=seeded(seed, name))
        tensors[name] = values / math.sqrt(param.shape[1])
    peft.write(folder, Adapter(settings, tensors))

"""Adapters (lora.py) as tensors by name: of a run, or read from a file of PEFT (weights/peft.py).

    transformer.blocks.0.attn.Wqkv.lora_A  (r, in)
    transformer.blocks.0.attn.Wqkv.lora_B  (out, r)
    ...

`of_run` reads those of a run, `check_fits` compares them with a model. `load.with_adapter` puts
them on their base.
"""

from dataclasses import dataclass

import torch

import checkpoint
import lora
from config import MPTConfig, TrainConfig
from program import require
from storage import checkpoint_files
from storage.checkpoint_files import read_metadata, require_weights


@dataclass
class Adapter:
    """A low-rank update of a model: W + scale B A for some of its linear layers."""

    settings: TrainConfig  # lora_rank, lora_alpha, rslora, lora_dropout
    tensors: dict[str, torch.Tensor]  # transformer.blocks.0.attn.Wqkv.lora_A (rank, in), ...
    base: str = ""  # the name of its base as its author wrote it

    @property
    def rank(self) -> int:
        """The rank of each update: rows of A, columns of B."""
        return self.settings.lora_rank

    @property
    def scale(self) -> float:
        """The factor on B A."""
        return self.settings.lora_scale


def of_run(path) -> Adapter:
    """The adapter of a run of ours, or of one of its checkpoints, in memory.

    With lora_train, the norms and biases that were trained are among its tensors. Raises UserError
    if the checkpoint is damaged or holds a whole model.
    """
    found = checkpoint.find(str(path))
    checkpoint.require_sound(found)
    settings = checkpoint_files.read_adapter_settings(found)
    require(settings, f"{found} holds a whole model, no adapters")
    metadata = read_metadata(found)
    trained = lora.trained_weights(checkpoint_files.read_settings(found), settings)
    require_weights(found, metadata, trained)
    tensors = {name: torch.empty_like(t, device="cpu") for name, t in trained.items()}
    checkpoint.fill(found, {"model": tensors}, metadata)
    return Adapter(settings, tensors, settings.init_from)


def check_fits(adapter: Adapter, cfg: MPTConfig, base) -> None:
    """UserError unless all layers of an adapter exist in a model, in these shapes."""
    shapes = cfg.linear_layers()
    for name, tensor in adapter.tensors.items():
        if not lora.is_adapter(name):
            continue
        block, layer, factor = (name.split(".")[i] for i in (2, 4, 5))
        other = f"the adapter is not of {base}"
        too_deep = f"{other}: it changes {name}, and {base} has {cfg.n_layers} blocks"
        require(int(block) < cfg.n_layers, too_deep)
        no_such_layer = f"{other}: it changes {name}, and {base} has no {layer}"
        require(layer in shapes, f"{no_such_layer}: its ffn_type is {cfg.ffn_type}")
        n_out, n_in = shapes[layer]
        wanted = (adapter.rank, n_in) if factor == "lora_A" else (n_out, adapter.rank)
        shape = tuple(tensor.shape)
        require(shape == wanted, f"{other}: {name} is {shape}, but {wanted} would fit")

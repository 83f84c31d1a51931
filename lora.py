r"""LoRA: finetune a model by adding an update of low rank to each linear layer (arXiv 2106.09685).

    y = W x + b + s B A x        W (out, in) stays as it is; A (r, in) and B (out, r) are trained

              ┌────── W, b ──────┐
        x ────┤                  (+)──── y        s = alpha / r, or alpha / sqrt(r) with rslora
              └── A ── B ── s ───┘

A whole update of W has out x in numbers; B A has r (out + in), at rank 8 about 1 in 400 for
MPT-7B. Adam's state and the checkpoints shrink by as much, and the backward pass does not compute
the gradients of W: a step costs 4 FLOPs for each weight and token, not 6. Activations hardly
shrink: a frozen layer no longer keeps its input, but its adapter needs that input for the gradient
of A.

A starts random, and B at zero: at step 0 the model is exactly the one it starts from. Afterwards
W + s B A is a weight like any other, and `merge` makes it so.

The usual way to write it is a module around the layer:

    class LoRALinear(nn.Module):                 but Wqkv.weight would become Wqkv.linear.weight
        def forward(self, x):
            return self.linear(x) + self.scale * (x @ self.A.T) @ self.B.T

Here a layer keeps its name, so that weights from anywhere fit, and its class changes to one that
adds the update (`put_on`). On a model that tensor parallelism has cut, each rank i adds the update
of its own part:

    column   y_i = W_i x + s B_i A x                 W and B are cut by rows, A is whole
    row      y = sum over i of (W_i + s B A_i) x_i   W and A are cut by columns, B is whole

A factor that every rank holds whole gets only part of its gradient on each, so these parts are
summed over the tensor ranks (tensor_parallel.sum_partial_gradients).

Run `python lora.py` to see adapters learn. A run with adapters:
`python fsdp_train.py configs/lora_demo.py`. Files for other libraries: weights/peft.py.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import MPTConfig, TrainConfig
from model import MPT, LayerNorm, RMSNorm, init_weights, seeded
from program import arguments, require, run
from tensor_parallel import ColumnLinear, RowLinear, is_adapter, layout_of


class LoRALinear(nn.Linear):
    """W x + b + s B A x."""

    def forward(self, x):
        """x (..., in) -> (..., out)."""
        # First, so that the layer's own matmul stays the last of its block: full activation
        # checkpointing does not repeat that one.
        added = low_rank_product(self, x)
        return super().forward(x) + added


class LoRAColumnLinear(ColumnLinear):
    """W_i x + s B_i A x, of which each rank has its own features."""

    def share(self, x):
        """x (B, T, in) -> (B, T, out / n)."""
        added = low_rank_product(self, x)
        return super().share(x) + added


class LoRARowLinear(RowLinear):
    """The sum of (W_i + s B A_i) x_i over the ranks, and the bias once."""

    def share(self, x):
        """x (B, T, in / n) -> (B, T, out), this rank's share of the sum."""
        added = low_rank_product(self, x)
        return super().share(x) + added


def low_rank_product(layer, x):
    """s B A x: (..., in) -> (..., out)."""
    x = F.dropout(x, layer.lora_dropout, layer.training)
    low = F.linear(x, layer.lora_A)  # (..., r)
    # B is scaled, not the product, since B is small; contiguous, since a CPU is slow at the
    # gradient of a transposed matrix.
    return low @ (layer.lora_scale * layer.lora_B).T.contiguous()


WITH_UPDATE = {nn.Linear: LoRALinear, ColumnLinear: LoRAColumnLinear, RowLinear: LoRARowLinear}
WITHOUT = {with_update: plain for plain, with_update in WITH_UPDATE.items()}

# --------------------------------------------------------------------------------------------------
# Putting it on a model


def put_on(model: MPT, cfg: TrainConfig) -> None:
    """Add adapters to a model, on the meta device or any other, and freeze all that cfg does not
    train. Their values are undefined: see `draw`.

    The model may have been cut over ranks.
    """
    for name, param in model.named_parameters():
        param.requires_grad_(is_trained_too(model, name, cfg))
    adapted = model.cfg.adapted_blocks(cfg.lora_last_blocks)
    for number, block in model.transformer.blocks.named_children():
        if int(number) not in adapted:
            continue
        layers = dict([*block.attn.named_children(), *block.ffn.named_children()])
        for name in model.cfg.adapted_layers(cfg.lora_targets):
            adapt(layers[name], cfg)
    model.lora = cfg


def is_trained_too(model: MPT, name: str, cfg: TrainConfig) -> bool:
    """Whether a parameter of the model itself is trained beside the adapters (lora_train)."""
    module, _, leaf = name.rpartition(".")
    is_norm = isinstance(model.get_submodule(module), LayerNorm | RMSNorm)
    wants = cfg.lora_train
    return ("norms" in wants and is_norm) or ("biases" in wants and leaf == "bias")


def adapt(layer: nn.Linear, cfg: TrainConfig) -> None:
    """Give one linear layer its A and B, in fp32 or wider."""
    out_features, in_features = layer.weight.shape  # of this tensor rank
    can_adapt = type(layer) in WITH_UPDATE
    require(
        can_adapt, f"lora knows no layer of the kind {type(layer).__name__}: set --lora_targets"
    )
    layer.__class__ = WITH_UPDATE[type(layer)]
    dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    options = {"device": layer.weight.device, "dtype": dtype}
    layer.lora_A = nn.Parameter(torch.empty(cfg.lora_rank, in_features, **options))
    layer.lora_B = nn.Parameter(torch.empty(out_features, cfg.lora_rank, **options))
    layer.lora_scale = cfg.lora_scale
    layer.lora_dropout = cfg.lora_dropout


def adapters_of(model: MPT) -> dict[str, nn.Parameter]:
    """The A and B of a model by name, such as transformer.blocks.0.attn.Wqkv.lora_A."""
    return {name: param for name, param in model.named_parameters() if is_adapter(name)}


def trained_weights(cfg: MPTConfig, train: TrainConfig) -> dict[str, torch.Tensor]:
    """The parameters that such a run trains, by name.

    Uncut, of the whole model, on the meta device.
    """
    with torch.device("meta"):
        model = MPT(cfg)
    put_on(model, train)
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


@torch.no_grad()
def draw(model: MPT, seed: int) -> None:
    """Fill the adapters: A uniform within +-1 / sqrt(in), as PyTorch draws a linear layer, B zero.

    The values depend on (seed, name) alone, not on the ranks that share the model.
    """
    layout = layout_of(model)
    for name, param in adapters_of(model).items():
        whole = torch.zeros(layout.whole_shape(name, param.shape))
        if name.endswith("lora_A"):
            bound = 1 / math.sqrt(whole.shape[1])
            whole.uniform_(-bound, bound, generator=seeded(seed, name))
        layout.copy_part(name, param, whole)


def store_frozen_in_bf16(model: MPT) -> None:
    """Store the frozen matrices of a model in bf16, as autocast would use them: half the memory.

    Norms and biases stay as they are: they are small, and a norm may compute in fp32.
    """
    for param in model.parameters():
        if not param.requires_grad and param.dim() > 1:
            param.data = param.data.to(torch.bfloat16)


# --------------------------------------------------------------------------------------------------
# Merging


@torch.no_grad()
def merge(model: MPT) -> float:
    """Make W + s B A the weight of each layer, and remove the adapters: a plain model is left.

    The sum is computed in fp32 or wider and rounded to W's dtype. Works on a model that tensor
    parallelism has cut, not on one that FSDP has sharded. Returns the largest rounding error of an
    element: 0 if W has the adapters' dtype, since nothing is rounded.
    """
    error = 0.0
    for layer in model.modules():
        if type(layer) not in WITHOUT:
            continue
        exact = layer.weight.to(layer.lora_A.dtype) + delta(layer)
        layer.weight.copy_(exact)
        error = max(error, (layer.weight.to(exact.dtype) - exact).abs().max().item())
        del layer.lora_A, layer.lora_B, layer.lora_scale, layer.lora_dropout
        layer.__class__ = WITHOUT[type(layer)]
    model.lora = None
    model.requires_grad_(True)
    return error


def delta(layer) -> torch.Tensor:
    """s B A: what an adapter adds to its layer's weight, (out, in)."""
    return layer.lora_scale * (layer.lora_B @ layer.lora_A)


def factors(update, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The A (rank, in) and B (out, rank) whose product B A is nearest to an update (out, in).

    From its singular value decomposition (Eckart and Young, 1936): exact if its rank is at most
    `rank`. The roots of the singular values go to both factors.
    """
    u, s, vh = torch.linalg.svd(update, full_matrices=False)
    root = s[:rank].sqrt()
    return root[:, None] * vh[:rank], u[:, :rank] * root


# --------------------------------------------------------------------------------------------------
# Demonstration


def demonstrate(argv) -> None:
    """Train adapters of ranks 1 to 16 on a small frozen model, and print what each reaches."""
    arguments(argv)
    cfg = MPTConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=256, max_seq_len=32, alibi=True)
    ids = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0))
    inputs, labels = ids[:, :-1], ids[:, 1:]
    print("eight random rows of 32 ids, learned by heart in 60 steps; uniform guess 5.545 nats")
    for rank in (1, 4, 16):
        model = MPT(cfg)
        init_weights(model, seed=0)
        put_on(model, TrainConfig(lora_rank=rank))
        draw(model, seed=0)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-2, weight_decay=0.0)
        for _ in range(60):
            loss = model(inputs, labels=labels) / labels.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        share = sum(p.numel() for p in trained) / sum(p.numel() for p in model.parameters())
        print(f"rank {rank:2}: {share:5.1%} of the weights are trained, loss {loss.item():.3f}")


if __name__ == "__main__":
    run(demonstrate)

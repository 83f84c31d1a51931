"""Many devices: the device mesh, and the sharding that is put on a model from outside.

A rank is one process with one device (processes.py). The ranks form a mesh with named dimensions:
each rank of dp_shard keeps a slice of every weight, gradient and optimizer state, and dp_replicate
holds copies of that arrangement. Unused dimensions get no process group: to create one makes all
ranks wait. One function of PyTorch, `fully_shard` (FSDP2), makes every mode:

    mode            mesh (replicate, shard)  weights between forward and backward   gradients are reduced    ZeRO
    FULL_SHARD      (n)                      freed, gathered again                  every microbatch          3
    SHARD_GRAD_OP   (n)                      kept                                   every microbatch          2
    ZERO1           (n)                      kept until the last microbatch         at the last microbatch    1
    DDP             (n, 1)                   always whole                           at the last microbatch    0
    HYBRID_SHARD    (nodes, ranks of a node) freed, gathered again                  as FULL_SHARD in a node   3 per node
                                                                               between nodes at the last

Weights, gradients and Adam's state are fp32; with bf16 the weights are gathered as bf16, gradients reduced as fp32.
One process alone has nothing to shard: it trains the plain model, under autocast.
Read `parallelize` first. Run `torchrun --nproc_per_node 2 parallel.py` to see a mesh. Read next: checkpoint.py.
"""

import functools
import time
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import config
import optim
import processes
from config import MPTConfig, TrainConfig, UserError, require
from model import MPT, init_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Outputs that selective activation checkpointing keeps: of matmuls with weights (not of batched ones, which are T x T
# attention scores) and of fused attention (FlexAttention's is computed again).
SAVED = {
    *(
        "aten::mm",
        "aten::addmm",
        "mpt::flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    *(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
}


def choose_precision(cfg: TrainConfig, device: torch.device, saved: str | None = None) -> str:
    """fp32 or bf16. `auto` keeps what a resumed run had; on a CPU it takes whichever multiplies matrices faster here,
    since old CPUs emulate bf16."""
    if cfg.precision != "auto":
        return cfg.precision
    if saved:
        return saved
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp32"  # V100 and older
    if device.type != "cpu":
        return "bf16"
    return processes.rank_zero_decides(faster_precision)


def faster_precision(n: int = 512, turns: int = 10) -> str:
    """The name of the dtype whose fastest n x n matrix product took less time; they take turns."""
    best = dict.fromkeys(DTYPES, float("inf"))
    for _ in range(turns):
        for name, dtype in DTYPES.items():
            a = torch.ones(n, n, dtype=dtype)
            begin = time.perf_counter()
            a @ a
            best[name] = min(best[name], time.perf_counter() - begin)
    return min(best, key=best.get)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """bf16 matmuls over fp32 weights, or nothing at all. A forward uses each weight once, so no cast is cached."""
    return torch.autocast(
        device.type, dtype=torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )


def build(model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str, seed: int | None):
    """This rank's part of a model, and its optimizer, as training has them.

    No rank ever holds the whole model. seed: of the initial weights; None leaves them as the memory
    was, for whoever fills them next. Returns (model, optimizer). A collective.
    """
    mesh = make_mesh(world, cfg)
    with torch.device("meta"):
        model = MPT(model_cfg)
    model = parallelize(model, mesh, cfg, precision)
    materialize(model, world.device, seed)
    return model, optim.build_optimizer(model.parameters(), cfg)


def make_mesh(world: processes.World, cfg: TrainConfig) -> DeviceMesh | None:
    """The grid of ranks: (dp_shard) or (dp_replicate, dp_shard). None for one process alone."""
    if world.dp_size == 1:
        return None
    shard = cfg.shard_ranks(world.dp_size, world.local_size)
    require(
        world.dp_size % shard == 0,
        f"shard_size {shard} does not divide the {world.dp_size} data-parallel ranks",
    )
    shape = {"dp_shard": shard}
    if cfg.sharding_mode.over != "all":
        shape = {"dp_replicate": world.dp_size // shard, "dp_shard": shard}
    with processes.in_time("connect the mesh"):
        return connect_mesh(world.device.type, tuple(shape.values()), tuple(shape))


def connect_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of all ranks. A collective.

    As init_device_mesh makes it, except for dimensions of size 1: there that makes a group for each
    rank, one after the other, while all ranks wait. Here a rank makes its own and waits for nobody.
    """
    if 1 not in shape:
        return init_device_mesh(device_type, shape, mesh_dim_names=names)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = [alone if size == 1 else dist.group.WORLD for size in shape]
    ranks = torch.arange(dist.get_world_size()).view(shape)
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)


def parallelize(model: MPT, mesh: DeviceMesh | None, cfg: TrainConfig, precision: str) -> MPT:
    """Put recomputation, compilation and sharding on a model that is still on the meta device, in this order."""
    recompute(model, cfg)
    if cfg.compile:
        for block in model.transformer.blocks:
            block.compile()
    if mesh is None:
        return model
    low = torch.bfloat16 if precision == "bf16" else None
    options = {
        "mesh": mesh,
        # Inputs are not cast: activations are bf16 already, and ALiBi's slopes must stay fp32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    }
    free = cfg.sharding_mode.frees_weights
    for block in model.transformer.blocks:
        fully_shard(block, reshard_after_forward=free, **options)
    return fully_shard(
        model, reshard_after_forward=False, **options
    )  # embeddings: used first and last, so kept


def recompute(model: MPT, cfg: TrainConfig) -> None:
    """Activation checkpointing of every `recompute_every`-th block. What a block keeps for its backward:

    none        whatever its operations need: 32 bytes per token and d_model in bf16
    selective   its input, and what SAVED computes; norms, GELU and sums are done again, which is cheap
    full        its input; everything is done again, a forward more, so 4/3 of the FLOPs
    """
    if cfg.activation_checkpointing == "none":
        return

    def choose(context, operation, *args, **kwargs):
        saved = operation.name() in SAVED
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    arguments = {"use_reentrant": False}
    if cfg.activation_checkpointing == "selective":
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, choose)
    for block in model.transformer.blocks[:: cfg.recompute_every]:
        block.recompute = arguments


def materialize(model: MPT, device: torch.device, seed: int | None) -> None:
    """Give a meta-device model memory, and each rank its part of the initial weights (none if seed is None).

    UserError if that memory is too small, or if a buffer would be left with what the memory held before.
    """
    buffers = ", ".join(name for name, _ in model.named_buffers())
    require(
        not buffers,
        f"nothing fills the buffers of model.py ({buffers[:80]}): compute them in forward instead",
    )
    try:
        model.to_empty(device=device)
    except (RuntimeError, MemoryError) as error:
        words = "the weights do not fit into the memory of a device: lower d_model or n_layers, or take more ranks"
        raise UserError(f"{words} ({config.one_line(error)})") from error
    if seed is not None:
        with torch.no_grad():
            init_weights(model, seed, assign_full)


def assign_full(param, full) -> None:
    """Copy a full tensor (on the CPU, the same on every rank) into a parameter, sharded or not."""
    if isinstance(param, DTensor):
        full = distribute_tensor(
            full.to(param.device), param.device_mesh, param.placements, src_data_rank=None
        )
    param.copy_(full)


def before_microbatch(model: MPT, cfg: TrainConfig, last: bool) -> None:
    """What waits for the last microbatch of a step: see the table above."""
    if not isinstance(model, FSDPModule):
        return
    if cfg.sharding_mode.reduces_late:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
    elif cfg.sharding_mode.over == "group":
        model.set_requires_all_reduce(last)  # the slow links between nodes are used once a step


def free_gathered_weights(model: MPT) -> None:
    """After a forward pass without backward: drop the gathered weights, which the optimizer would not update."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clip_grad_norm(params, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most max_norm (0: leave them). Returns the norm, fp32 scalar.

    Each rank sums the squares of its shards; each mesh dimension over which a gradient is sharded adds them up. So it
    holds for any mixture of plain tensors, meshes and placements. A collective: call it on every rank.
    """
    groups = defaultdict(list)  # (mesh, dimensions over which it is sharded) -> local gradients
    for p in params:
        if isinstance(p.grad, DTensor):
            dims = tuple(
                i for i, placement in enumerate(p.grad.placements) if not placement.is_replicate()
            )
            groups[p.grad.device_mesh, dims].append(p.grad.to_local())
        elif p.grad is not None:
            groups[None, ()].append(p.grad)
    total = torch.zeros((), device=next(iter(groups.values()))[0].device)
    for (mesh, dims), grads in groups.items():
        squares = torch.stack(torch._foreach_norm(grads)).float().square().sum()
        for dim in dims:
            dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares
    norm = total.sqrt()
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grads in groups.values():
            torch._foreach_mul_(grads, scale)
    return norm


def demonstrate(argv) -> None:
    (cfg,) = config.load(argv, TrainConfig)
    world = processes.start(cfg.device)
    mesh = make_mesh(world, cfg)
    require(mesh, "one process has no mesh: torchrun --nproc_per_node 2 parallel.py")
    place = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
    print(
        f"rank {world.global_rank} of {world.global_size} on {world.device}, {cfg.sharding}: {place}",
        flush=True,
    )


if __name__ == "__main__":
    processes.run(demonstrate)

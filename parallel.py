"""Many devices: the device mesh, and the sharding that is put on a model from outside.

A rank is one process with one device (processes.py). The ranks form a mesh with named dimensions:
the ranks along dp_shard each keep a slice of every weight, gradient and optimizer state, and along
dp_replicate the slices are repeated. One function of PyTorch, `fully_shard` (FSDP2), makes every
mode (config.SHARDING_MODES has this table as code):

    mode           mesh (replicate, shard)   whole weights of a     gradients are          ZeRO
                                             block are freed        reduced                stage
    FULL_SHARD     (n)                       after each pass        in each microbatch     3
    SHARD_GRAD_OP  (n)                       after each backward    in each microbatch     2
    ZERO1          (n)                       after last backward    in the last microbatch 1
    DDP            (n, 1)                    never: no shards       in the last microbatch 0
    HYBRID_SHARD   (nodes, ranks of a node)  after each pass        in a node: in each;    3 in a
                                                                    across: in the last    node

Weights, gradients and Adam's state are fp32. In bf16 the weights are gathered as bf16, and the
gradients are reduced as fp32. One process alone has nothing to shard: it trains the plain model,
under autocast.

With tensor parallelism (tensor_parallel.py) and pipeline parallelism (pipeline.py) the global ranks
form a grid of stages x data-parallel ranks x tensor ranks, and "rank" above means a data-parallel
one. Those of the same stage and tp_rank have a mesh of their own, and shard what they have over it.

`build` says in which order all this is put on a model. Run
`torchrun --nproc_per_node 2 parallel.py` to see a mesh.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import attention
import config
import devices
import optim
import processes
import program
from config import MPTConfig, TrainConfig
from launch import heartbeat
from model import MPT, Block, init_weights, initial_weight, seeded
from program import UserError, require

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The operations whose outputs selective activation checkpointing keeps: matmuls with weights, and
# fused attention. Not batched matmuls, whose outputs are the T x T scores, and not FlexAttention.
SAVED = {
    "aten::mm",
    "aten::addmm",
    "mpt::flash_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}


# --------------------------------------------------------------------------------------------------
# Building


def check(model_cfg: MPTConfig, cfg: TrainConfig) -> None:
    """UserError if the model cannot be cut into cfg.tp parts and cfg.pp stages."""
    model_cfg.check_tensor_ranks(cfg.tp, cfg.sequence_parallel)
    model_cfg.check_stages(cfg.pp)
    for name, ranks in {"tp": cfg.tp, "pp": cfg.pp}.items():
        possible = ranks == 1 or cfg.compile is not True
        require(possible, f"{name} does not work with compiled blocks: set --compile=False")


def build(model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str, seed: int | None):
    """This rank's part of a model, and its optimizer, ready for training. A collective.

    A sharded model is never whole on a rank. seed: of the initial weights; None leaves them
    undefined, for a caller who loads others. Returns (model, optimizer).
    """
    mesh = make_mesh(world, cfg)
    with torch.device("meta"):  # shapes without memory
        model = MPT(model_cfg)
    if world.tp_size > 1:
        import tensor_parallel  # here, since most runs do without

        tensor_parallel.cut(model, tensor_parallel.team_of(world, cfg.sequence_parallel))
    if world.pp_size > 1:
        import pipeline

        pipeline.keep_stage(model, pipeline.pipe_of(world))
    put_adapters_on(model, cfg, precision)
    model = parallelize(model, mesh, cfg, precision)
    materialize(model, world.device, seed)
    if cfg.lora_rank:
        import lora

        lora.draw(model, cfg.seed)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = optim.build_optimizer(named, cfg)
    optim.require_peak_rates(optimizer, cfg)
    return model, optimizer


def put_adapters_on(model: MPT, cfg: TrainConfig, precision: str) -> None:
    """Add the adapters that cfg asks for. In bf16, the matrices that they freeze are stored so."""
    if not cfg.lora_rank:
        return
    import lora  # here, since most runs do without

    lora.put_on(model, cfg)
    if precision == "bf16":
        lora.store_frozen_in_bf16(model)


def parallelize(model: MPT, mesh: DeviceMesh | None, cfg: TrainConfig, precision: str) -> MPT:
    """Add recomputation, compilation and sharding, in this order, to a model on the meta device.

    What `fully_shard(block)` does: each rank keeps 1/n of every weight of the block. Hooks gather
    the whole weights (all-gather) just before the block's forward and free them after it. In the
    backward they gather them again; then each rank gets its 1/n of the gradient, averaged over the
    ranks (reduce-scatter), and adds it to what earlier microbatches left. On a GPU the next block's
    weights arrive while one block computes.
    """
    recompute(model, cfg)
    if cfg.compile is True:
        for block in model.transformer.blocks:
            block.compile()
    if mesh is None:
        return model
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=torch.float32,
        # Activations are bf16 already, and ALiBi's slopes must stay fp32.
        cast_forward_inputs=False,
    )
    frees_weights = cfg.sharding_mode.frees_weights
    for block in model.transformer.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=frees_weights)
    # What is left (embeddings, final norm) is used first and last, so it stays whole in between.
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def recompute(model: MPT, cfg: TrainConfig) -> None:
    """Activation checkpointing of every `recompute_every`-th block: what to keep for the backward.

    none        all intermediate activations: 32 x d_model bytes per token in bf16
    selective   its input and the outputs of SAVED; norms, activations, sums, and the products
                with the B of adapters, as large as a layer's output and cheap, are computed again
    full        its input; everything is computed again: one more forward, 4/3 of the FLOPs
    """
    if cfg.activation_checkpointing == "none":
        return

    def choose(context, operation, *args, **kwargs):
        is_saved = operation.name() in SAVED
        if operation.name() == "aten::mm" and args[1].shape[0] == cfg.lora_rank:  # (rank, out)
            is_saved = False
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    arguments = {"use_reentrant": False}
    if cfg.activation_checkpointing == "selective":
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, choose)
    for number, block in model.transformer.blocks.named_children():
        if int(number) % cfg.recompute_every == 0:  # in the whole model: a stage has some of them
            block.__class__ = RecomputedBlock
            block.recompute = arguments


class RecomputedBlock(Block):
    """A block that keeps little for its backward, and computes the rest again there.

    `recompute`: how, as torch.utils.checkpoint takes it.
    """

    def forward(self, x, positions, cache=None, layer=0):
        """x (B, T, d_model) -> (B, T, d_model)."""
        if cache is not None or not torch.is_grad_enabled():
            return super().forward(x, positions, cache, layer)
        return checkpoint(super().forward, x, positions, None, layer, **self.recompute)


def materialize(model: MPT, device: torch.device, seed: int | None) -> None:
    """Allocate a model that is on the meta device, and draw this rank's part of its weights.

    seed: None leaves them undefined. UserError if memory is too small, or if the model has buffers,
    which nothing here would fill.
    """
    buffers = ", ".join(name for name, _ in model.named_buffers())
    require(
        not buffers,
        f"nothing fills the buffers of model.py ({buffers[:80]}): compute them in forward instead",
    )
    try:
        model.to_empty(device=device)
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            "the weights do not fit into the memory of a device: lower d_model or n_layers, or "
            f"take more ranks ({program.one_line(error)})"
        ) from error
    if seed is not None:
        draw_weights(model, seed)


@torch.no_grad()
def draw_weights(model: MPT, seed: int) -> None:
    """`init_weights`; of a model that is cut over ranks, each keeps its part of a tensor."""
    if not (isinstance(model, FSDPModule) or is_cut(model)):
        init_weights(model, seed)
        return
    import tensor_parallel  # here, since one process alone does without

    layout = tensor_parallel.layout_of(model)
    for name, param in model.named_parameters():
        whole = initial_weight(name, layout.whole_shape(name, param.shape), model.cfg, seed)
        layout.copy_part(name, param, whole)


# --------------------------------------------------------------------------------------------------
# The mesh


def make_mesh(world: processes.World, cfg: TrainConfig) -> DeviceMesh | None:
    """The grid of data-parallel ranks: (dp_shard) or (dp_replicate, dp_shard). A collective.

    For 16 ranks and shards over 8 of them it is what PyTorch makes by

        init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp_replicate", "dp_shard"))

    Each stage has such a grid for each of its tensor ranks. None for one data-parallel rank alone.
    UserError if cfg.shard_size does not divide them.
    """
    if world.dp_size == 1:
        return None
    of_node = min(world.dp_size, max(1, world.local_size // world.tp_size))
    shard = cfg.shard_ranks(world.dp_size, of_node)
    require(
        world.dp_size % shard == 0,
        f"shard_size {shard} does not divide the {world.dp_size} data-parallel ranks",
    )
    shape = {"dp_shard": shard}
    if cfg.sharding_mode.over != "all":
        shape = {"dp_replicate": world.dp_size // shard, "dp_shard": shard}
    with heartbeat.within("connect the mesh"):
        return connect_mesh(world.device.type, tuple(shape.items()), world.dp_group, world.timeout)


def connect_mesh(device_type: str, shape, dp_group, timeout) -> DeviceMesh:
    """A mesh of the ranks of dp_group (None: all), of which this is one. A collective of them.

    shape: (name, size) of each dimension. init_device_mesh would make the groups of all ranks, and
    all would wait for each. Here a rank makes its own groups, with the timeout of the run.
    """
    dp_group = dp_group or dist.group.WORLD
    names, sizes = zip(*shape, strict=True)
    ranks = torch.tensor(dist.get_process_group_ranks(dp_group)).view(sizes)
    coordinates = (ranks == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for dim, size in enumerate(sizes):
        index = tuple(slice(None) if d == dim else at for d, at in enumerate(coordinates))
        is_all = size == ranks.numel()
        groups.append(dp_group if is_all else processes.group_of(ranks[index].tolist(), timeout))
    groups = groups if len(groups) > 1 else groups[0]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)


# --------------------------------------------------------------------------------------------------
# A step: its passes, then its gradients


class Passes:
    """The forward and backward passes of a step: in which dtype, and what they send to other ranks.

    with passes.forward():
        loss = model(ids, labels=labels)
    with passes.backward(is_last):     whether this is the last microbatch of the step
        loss.backward()
    """

    def __init__(self, model: MPT, cfg: TrainConfig, precision: str):
        self.model, self.cfg = model, cfg
        self.autocast = autocast(next(model.parameters()).device, precision)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Matmuls are in bf16, or everything is in fp32."""
        with record_function("forward"), self.autocast:
            yield

    @contextlib.contextmanager
    def backward(self, is_last: bool) -> Iterator[None]:
        """Gradients are reduced as the sharding mode says.

        Autocast must be off: it would change the dtype in which our autograd functions compute.
        """
        postpone_communication(self.model, self.cfg, is_last)
        with record_function("backward"):
            yield


@contextlib.contextmanager
def run_passes(model: MPT, cfg: TrainConfig, precision: str, n: int) -> Iterator[Passes]:
    """A context for the n forward and n backward passes of a step: see `Passes`."""
    with cast_weights_once(model, precision, n):
        yield Passes(model, cfg, precision)


def postpone_communication(model: MPT, cfg: TrainConfig, is_last: bool) -> None:
    """Before a backward: postpone communication to the step's last one, where the mode says so.

    ZERO1, DDP: the reduction of the gradients. HYBRID_SHARD: their all-reduce between groups.
    """
    if not isinstance(model, FSDPModule):
        return
    if cfg.sharding_mode.reduces_late:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
    elif cfg.sharding_mode.over == "group":
        model.set_requires_all_reduce(is_last)  # the slow links between nodes are used once a step


def seed_dropout(cfg: TrainConfig, step: int, world) -> None:
    """Seed the generator from (seed, step, rank), so that a resumed run draws the same masks.

    The data-parallel rank counts: the ranks of a team need equal masks for what all of them have.
    With sequence parallelism each has tokens of its own, and the tensor rank counts as well.
    """
    tp_rank = world.tp_rank if cfg.sequence_parallel else 0
    name = f"dropout of step {step}, ranks dp {world.dp_rank}, tp {tp_rank}, pp {world.pp_rank}"
    torch.manual_seed(seeded(cfg.seed, name).initial_seed())


def finish_gradients(model: MPT) -> None:
    """Add up the gradients of weights that several tensor ranks or stages have. A collective.

    Nothing to do without them: the data-parallel ranks' have been reduced during the backward.
    """
    if is_cut(model):
        import tensor_parallel  # here, since most runs do without

        tensor_parallel.sum_partial_gradients(model)
    if hasattr(model, "pipe"):
        import pipeline

        pipeline.sum_tied_gradients(model)


def grad_norm(model: MPT) -> torch.Tensor:
    """The norm of all gradients of a model over all ranks, an fp32 scalar. A collective.

    The root of the sum of their squares: each rank sums over its own part of the gradients, and
    all-reduces add these sums up. Which parts count on which rank: see `counted_gradients`.
    """
    parts = counted_gradients(model)
    nothing = torch.zeros((), device=next(model.parameters()).device)
    norms = torch._foreach_norm(parts) if parts else [nothing]
    total = torch.stack(norms).float().square().sum()
    for group in groups_that_share(model):
        dist.all_reduce(total, group=group)
    if is_cut(model) or hasattr(model, "pipe") or has_replicas(model):
        # Groups of other data-parallel ranks may have added in another order. Copies of a weight
        # stay equal only if all are clipped by the same number.
        dist.broadcast(total, src=0)
    return total.sqrt()


def counted_gradients(model: MPT) -> list[torch.Tensor]:
    """This rank's shards of the gradients: over all ranks, each value is counted once.

    Some tensors are whole on every tensor rank: one of them counts. A tied embedding is on two
    stages: the first one counts.
    """
    is_later_stage = hasattr(model, "pipe") and not model.pipe.is_first
    counted = []
    for name, param in model.named_parameters():
        is_second_copy = is_later_stage and name == "transformer.wte.weight"
        grad = param.grad
        if grad is None or is_second_copy:
            continue
        if is_cut(model):
            counted += model.layout.counted_parts(name, grad)
        else:
            counted.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    return counted


def groups_that_share(model: MPT) -> list[dist.ProcessGroup]:
    """The groups over whose ranks the gradients are spread: shards, tensor ranks, stages."""
    groups = []
    param = next(model.parameters())
    if isinstance(param, DTensor):
        dims = [dim for dim, kind in enumerate(param.placements) if not kind.is_replicate()]
        groups += [param.device_mesh.get_group(dim) for dim in dims]
    if is_cut(model):
        groups.append(model.team.group)
    if hasattr(model, "pipe"):
        groups.append(model.pipe.group)
    return groups


def has_replicas(model: MPT) -> bool:
    """Whether several groups of ranks shard one copy of the weights each, as in HYBRID_SHARD."""
    param = next(model.parameters())
    if not isinstance(param, DTensor):
        return False
    mesh = param.device_mesh
    return mesh.ndim == 2 and min(mesh.shape) > 1


def is_cut(model: MPT) -> bool:
    """Whether tensor ranks share the layers of a model: `tensor_parallel.cut` gave it a team."""
    return hasattr(model, "team")


# --------------------------------------------------------------------------------------------------
# Evaluation


def run_uncompiled(model: MPT):
    """A context for evaluation: blocks run as written, but where `attention.stays_compiled`."""
    stays = attention.stays_compiled(model.cfg.attn_impl)
    return torch.compiler.set_stance("default" if stays else "force_eager")


def free_gathered_weights(model: MPT) -> None:
    """Free the weights that a forward pass without backward has gathered.

    They would take memory, and be out of date as soon as the optimizer updates the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# --------------------------------------------------------------------------------------------------
# Precision


def choose_precision(cfg: TrainConfig, device: torch.device, saved: str | None = None) -> str:
    """fp32 or bf16, the same on all ranks: what `devices.choose_precision` says on rank 0.

    A collective. saved: the precision of the checkpoint that a run resumes from.
    """
    return processes.rank_zero_decides(lambda: devices.choose_precision(cfg, device, saved)[0])


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """A context for forward passes: matmuls in bf16, or everything in fp32."""
    is_bf16 = precision == "bf16"
    # Nearly every weight is used once in a forward pass, so a cache of casts would waste memory.
    return torch.autocast(device.type, torch.bfloat16, enabled=is_bf16, cache_enabled=False)


@contextlib.contextmanager
def cast_weights_once(model: MPT, precision: str, n_microbatches: int) -> Iterator[None]:
    """A context for all microbatches of a step, in which linear layers have bf16 weights.

    For one process alone. Autocast would cast each fp32 weight to bf16 in every microbatch, and
    each gradient back. Here one bf16 copy stands in the weight's place for the whole step, and its
    gradients are added to the weight's own in fp32. Results are rounded as with autocast (the B of
    an adapter once more), and each microbatch after the first moves 14 bytes less per weight.
    `fully_shard` does the same with the weights that it gathers. Not cast here:

        a single microbatch     casts nothing twice
        recomputed blocks       the graph does not keep their copies, so memory would grow
        norms                   choose their own dtype
        the output layer        loss.py sums its gradient in fp32
    """
    weights = []
    if precision == "bf16" and n_microbatches > 1 and not isinstance(model, FSDPModule):
        weights = linear_weights(model)
    try:
        for linear, name, weight in weights:
            copy = torch.nn.Parameter(weight.detach().to(torch.bfloat16), weight.requires_grad)
            if weight.requires_grad:
                hand_over = functools.partial(hand_over_gradient, weight)
                copy.register_post_accumulate_grad_hook(hand_over)
            setattr(linear, name, copy)
        yield
    finally:
        for linear, name, weight in weights:
            setattr(linear, name, weight)


def linear_weights(model: MPT) -> list[tuple]:
    """(layer, name, weight or bias) of the linear layers in blocks that are not recomputed."""
    found = []
    for block in model.transformer.blocks:
        layers = [] if isinstance(block, RecomputedBlock) else block.modules()
        for layer in layers:
            if isinstance(layer, torch.nn.Linear):
                found += [(layer, *named) for named in layer.named_parameters()]
    return found


def hand_over_gradient(weight, copy) -> None:
    """Add the gradient of a weight's bf16 copy to the weight's own, which is fp32."""
    if weight.grad is None:
        weight.grad = copy.grad.to(weight.dtype)
    else:
        weight.grad += copy.grad
    copy.grad = None


def attention_of(model_cfg: MPTConfig, device: torch.device, precision: str) -> str:
    """The implementation of attention that a run takes: `attention.choose`."""
    return attention.choose(
        model_cfg.attn_impl,
        device,
        DTYPES[precision],
        model_cfg.head_dim,
        model_cfg.alibi or model_cfg.window is not None,
        model_cfg.attn_pdrop,
        model_cfg.attn_logit_softcapping,
    )


def demonstrate(argv) -> None:
    """Print where each rank is in the mesh."""
    (cfg,) = config.load(argv, TrainConfig)
    world = processes.start(cfg.device, tp=cfg.tp, pp=cfg.pp)
    mesh = make_mesh(world, cfg)
    require(mesh, "one data-parallel rank has no mesh: torchrun --nproc_per_node 2 parallel.py")
    coordinates = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
    who = f"global rank {world.global_rank} of {world.global_size} on {world.device}"
    stage = f", stage {world.pp_rank}" * (world.pp_size > 1)
    team = f", tensor rank {world.tp_rank}" * (world.tp_size > 1)
    print(f"{who}, {cfg.sharding}: {coordinates}{stage}{team}", flush=True)


if __name__ == "__main__":
    processes.run(demonstrate)

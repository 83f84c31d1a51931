"""A small model on ranks in any layout: its curve, its gradients, its checkpoints.

A job is (model settings, settings). Functions of `(world, ...)` run on each rank of a pool:

    check(ranks, 4, [(MODEL, replace(RUN, tp=2, pp=2))])     has the curve of one process
"""

import functools
import itertools
import math
from dataclasses import asdict, fields, replace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import checkpoint
import flops
import fsdp_train
import lora
import parallel
import processes
import tensor_parallel
from config import MPTConfig, TrainConfig
from loss import IGNORE
from model import initial_weight
from program import UserError
from storage.checkpoint_files import read_metadata
from storage.pieces import name_of_param

# A vocabulary of 99 cannot be cut into equal parts, nor five layers into two, three or four stages.
MODEL = MPTConfig(
    d_model=32, n_heads=4, n_layers=5, vocab_size=99, max_seq_len=16, alibi=True, kv_n_heads=4
)
RUN = TrainConfig(
    global_batch_size=8,
    microbatch_size=2,
    max_steps=20,
    warmup_steps=2,
    lr=2e-3,
    decoupled_weight_decay=1e-4,
    sharding="ZERO1",
    precision="fp32",
)
LORA = {"init_from": "a base", "lora_rank": 4, "lora_alpha": 8.0, "lr": 2e-2}
STEPS = 6
SEPARATOR = 5  # the id that ends a document, with attn_uses_sequence_id

# The same run as plainly as can be: one process, the whole batch at once.
PLAIN = {
    "tp": 1,
    "pp": 1,
    "sequence_parallel": False,
    "sharding": "DDP",
    "shard_size": 0,
    "activation_checkpointing": "none",
    "microbatch_size": 8,
}


def settings(model_cfg=MODEL, cfg=RUN, **changes):
    """The job with these changes, each of a setting of the model or of the run."""
    of_model = {field.name for field in fields(MPTConfig)}
    for_model = {name: value for name, value in changes.items() if name in of_model}
    for_run = {name: value for name, value in changes.items() if name not in of_model}
    return replace(model_cfg, **for_model), replace(cfg, **for_run)


def is_possible(job) -> bool:
    """Whether config and the two ways to cut a model accept the job."""
    model_cfg, cfg = job
    try:
        model_cfg.check()
        cfg.check()
        parallel.check(model_cfg, cfg)
        flops.check_adapters(model_cfg, cfg)
    except UserError:
        return False
    return True


def plainly(job):
    """The same job for one process."""
    model_cfg, cfg = job
    return model_cfg, replace(cfg, **PLAIN)


@functools.cache
def team_of(tp, pp=1):
    """In a rank's process: its world as a grid. Each grid makes groups: keep them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return processes.in_grid(processes.World(rank, size, rank, size, torch.device("cpu")), tp, pp)


def rows_of_step(step, cfg, model_cfg):
    """The whole batch, (B, T + 1); some labels do not count, more in some rows than in others."""
    generator = torch.Generator().manual_seed(step)
    shape = cfg.global_batch_size, model_cfg.max_seq_len + 1
    rows = torch.randint(0, model_cfg.vocab_size, shape, generator=generator)
    rows[: cfg.global_batch_size // 3, -1] = IGNORE  # of a label: it is no input
    return rows


def build(job, draws=True):
    """(world, model, optimizer) of this rank. Without draws the weights are undefined."""
    model_cfg, cfg = job
    world = team_of(cfg.tp, cfg.pp)
    seed = cfg.seed if draws else None
    model, optimizer = parallel.build(model_cfg, cfg, world, cfg.precision, seed)
    model.separator = SEPARATOR
    return world, model, optimizer


def take_steps(model, optimizer, steps, world, job):
    """[(loss, gradient norm), ...]"""
    model_cfg, cfg = job
    curve = []
    for step in steps:
        rows = rows_of_step(step, cfg, model_cfg).chunk(world.dp_size)[world.dp_rank]
        loss, norm, _ = fsdp_train.train_step(
            model, optimizer, rows, step, cfg, world, cfg.precision
        )
        curve.append((loss.item(), norm.item()))
    return curve


def curves(_, jobs, steps=STEPS):
    """The curve of each job. Their initial weights must be parts of the whole ones."""
    found = []
    for job in jobs:
        world, model, optimizer = build(job)
        assert_initial(model, job)
        found.append(take_steps(model, optimizer, range(steps), world, job))
    return found


def places(layout, name, tensor):
    """(where it is in the whole tensor, the piece) of each piece that this rank has."""
    for corner, piece in layout.pieces(name, tensor):
        yield tuple(slice(a, a + n) for a, n in zip(corner, piece.shape, strict=True)), piece


def assert_initial(model, job) -> None:
    """Each piece of a weight is that of the whole initial weight, bit by bit."""
    model_cfg, cfg = job
    layout = tensor_parallel.layout_of(model)
    for name, param in model.named_parameters():
        if lora.is_adapter(name) or param.dtype != torch.float32:
            continue
        whole = initial_weight(name, layout.whole_shape(name, param.shape), model_cfg, cfg.seed)
        for place, piece in places(layout, name, param.detach()):
            assert torch.equal(whole[place], piece), name


def largest_differences(found, wanted):
    """(of the losses, of the gradient norms) over the steps, relative to what is wanted."""
    pairs = list(zip(found, wanted, strict=True))
    assert all(math.isfinite(value) for pair in pairs for row in pair for value in row)
    losses, norms = (max(abs(ours[i] / theirs[i] - 1) for ours, theirs in pairs) for i in (0, 1))
    return losses, norms


def assert_near(found, wanted, what="", of_loss=5e-6, of_norm=1e-5) -> None:
    """The same curve but for the order of sums."""
    losses, norms = largest_differences(found, wanted)
    assert losses < of_loss and norms < of_norm, (what, losses, norms)


def check(ranks, size, jobs, steps=STEPS, **tolerances) -> None:
    """Each job on `size` ranks has the curve of one process."""
    of_ranks = ranks(size)(curves, jobs, steps)
    plain_jobs = []
    for job in map(plainly, jobs):
        if job not in plain_jobs:
            plain_jobs.append(job)
    (plain,) = ranks(1)(curves, plain_jobs, steps)
    for number, job in enumerate(jobs):
        wanted = plain[plain_jobs.index(plainly(job))]
        for of_rank in of_ranks:
            assert_near(of_rank[number], wanted, job, **tolerances)


# --- Checkpoints


def save(_, job, folder):
    """Three steps, then a checkpoint. Returns the names of tensors that differ from it."""
    world, model, optimizer = build(job)
    take_steps(model, optimizer, range(3), world, job)
    saver = checkpoint.Checkpointer(str(folder), world.device, keep_last=1)
    meta = asdict(job[0]) | asdict(job[1]) | {"data_fingerprint": "of no data"}
    saver.save(3, model, optimizer, meta)
    saver.finish()
    return unlike(checkpoint.latest(folder), model, optimizer)


def load_and_continue(_, job, path):
    """(names of tensors that differ from the whole ones of the checkpoint, the next losses)"""
    draws = job[1].lora_rank > 0  # the base of adapters is in no checkpoint
    world, model, optimizer = build(job, draws)
    checkpoint.load(path, model, optimizer)
    wrong = unlike(path, model, optimizer)
    return wrong, take_steps(model, optimizer, range(3, 5), world, job)


def unlike(path, model, optimizer) -> list[str]:
    """The names of a rank's tensors that are not bit-equal to their places in a checkpoint."""
    whole = {}
    for key, entry in read_metadata(path).state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            whole[key] = torch.full(entry.size, torch.nan)
    checkpoint.fill(path, whole)
    layout = tensor_parallel.layout_of(model)
    wrong = []
    for part, tensors in checkpoint.state_of(model, optimizer).items():
        for key, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                continue
            name = f"{part}.{key}"
            pieces = [((), value)]  # of a scalar
            if value.dim():
                pieces = places(layout, name_of_param(name), value.detach())
            wrong += [key for place, piece in pieces if not torch.equal(whole[name][place], piece)]
    return wrong


# --- Settings together


def covering_set(options, possible):
    """Cases {option: value} in which every two values of two options occur together.

    They are chosen greedily. possible(case): whether two values can be together.
    """
    items = [(name, number) for name in options for number in range(len(options[name]))]
    pairs = [frozenset(pair) for pair in itertools.combinations(items, 2)]
    allowed = {pair for pair in pairs if len(dict(pair)) == 2 and possible(values(pair, options))}
    missing, cases = set(allowed), []
    while missing:
        chosen = dict(min(missing, key=sorted))
        for name in options:
            if name not in chosen:
                add_best(name, chosen, options, allowed, missing)
        missing -= {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        cases.append(values(chosen.items(), options))
    return cases


def add_best(name, chosen, options, allowed, missing) -> None:
    """Add the value that makes the most missing pairs with those that are chosen."""
    gains = {}
    for number in range(len(options[name])):
        pairs = {frozenset({(name, number), item}) for item in chosen.items()}
        if pairs <= allowed:
            gains[number] = len(pairs & missing)
    chosen[name] = max(gains, key=gains.get)


def values(items, options):
    """{option: value} of [(option, number of its value), ...]."""
    return {name: options[name][number] for name, number in items}

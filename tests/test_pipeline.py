"""pipeline.py on real gloo ranks: however the layers are cut into stages, training is the same."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from test_tensor_parallel import MODEL, RUN, largest_differences, take_steps

import parallel
import processes

MODEL = replace(MODEL, n_layers=5)
STEPS = 10


def stages_of(cfg):
    """In a rank's process: its world."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = processes.World(rank, size, rank, size, torch.device("cpu"))
    return processes.in_grid(world, cfg.tp, cfg.pp)


def curve_of(job, precision="fp32", steps=STEPS):
    model_cfg, cfg = job
    world = stages_of(cfg)
    model, optimizer = parallel.build(model_cfg, cfg, world, precision, cfg.seed)
    return take_steps(model, optimizer, range(steps), world, cfg, model_cfg, precision)


def curves(_, jobs, precision="fp32"):
    return [curve_of(job, precision) for job in jobs]


def check(ranks, size, jobs, precision="fp32", of_loss=5e-6, of_norm=1e-5):
    of_ranks = ranks(size)(curves, jobs, precision)
    alone = [(m, replace(cfg, tp=1, pp=1, sequence_parallel=False)) for m, cfg in jobs]
    (wanted,) = ranks(1)(curves, alone, precision)
    for number, job in enumerate(jobs):
        for of_rank in of_ranks:
            losses, norms = largest_differences(of_rank[number], wanted[number])
            assert losses < of_loss and norms < of_norm, (job, losses, norms)


@pytest.mark.parametrize("size, pp", [(2, 2), (4, 2), (4, 4)])
def test_stages_train_as_one_process(ranks, size, pp):
    check(ranks, size, [(MODEL, replace(RUN, pp=pp))])

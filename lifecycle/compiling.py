"""Whether blocks can be compiled here: one block is tried before the run needs it.

`auto` compiles on GPUs. PyTorch's compiler may lack a C compiler, or not know a device or a shape.
So `choose` compiles one block of each kind and takes it forward and backward on zeros, before
anything large is in memory. If it fails on one rank, no rank compiles, and a line says why.
"""

import gc
import math
from dataclasses import replace

import torch

import data
import parallel
import processes
import program
from config import MPTConfig, TrainConfig
from model import MPT
from program import UserError


def choose(model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str) -> bool:
    """Whether to compile the blocks, the same on all ranks: cfg.compile, or what it means if auto.

    `auto` compiles on GPUs, if one block can be compiled on every rank. If not, rank 0 prints why.
    A collective, called before anything large is in memory. UserError if cfg.compile is True, and
    compiling fails.
    """
    if cfg.compile is False or (cfg.compile == "auto" and world.device.type != "cuda"):
        return False
    if cfg.tp * cfg.pp > 1:  # their checks refuse True
        if world.global_rank == 0:
            print("nothing is compiled: that does not work with tp or pp", flush=True)
        return False
    faults = processes.together(lambda: compiler_fault(model_cfg, cfg, world, precision))
    fault = next(filter(None, faults), "")
    if not fault:
        return True
    line = f"compiling a block fails on rank {faults.index(fault)}: {fault}"
    if cfg.compile is True:
        raise UserError(f"{line} (set --compile=False)", on_all_ranks=True)
    if world.global_rank == 0:
        print(f"nothing is compiled: {line}", flush=True)
    return False


def compiler_fault(model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str) -> str:
    """Why a block of this model cannot be compiled on this rank, "" if it can."""
    fault = ""
    try:
        compile_blocks(model_cfg, replace(cfg, compile=True), world, precision)
    except Exception as error:
        # Too little memory, and what only the user can mend, come again in the run, which says so.
        if not (isinstance(error, UserError) or program.out_of_memory(error)):
            cause = getattr(error, "inner_exception", error)
            fault = program.one_line(cause) or type(error).__name__
    # The run begins with a fresh compiler, to which another number of rows is no sign that it
    # changes all the time, and with free memory.
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return fault


def compile_blocks(model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str) -> None:
    """Forward and backward through a compiled block of each kind of this model, on zeros.

    If the run compiles the same, for as many rows, it finds most of the work in PyTorch's cache.
    The hooks that `fully_shard` puts around a block are not tried.
    """
    if cfg.microbatch_size == "auto":
        cfg = replace(cfg, microbatch_size=2)
    rows_of_rank = cfg.global_batch_size // world.dp_size
    n_rows = data.microbatch_rows(rows_of_rank, cfg)
    n_layers = min(2, cfg.recompute_every)  # the first is recomputed, the second is not
    with world.device:
        model = MPT(replace(model_cfg, n_layers=n_layers, vocab_size=1))
        ids = torch.zeros(n_rows, model_cfg.max_seq_len, dtype=torch.long)
    model.separator = 0
    parallel.put_adapters_on(model, replace(cfg, lora_last_blocks=0), precision)
    if world.dp_size > 1:
        model.transformer.blocks.to(parallel.DTYPES[precision])  # as fully_shard gathers them
    parallel.parallelize(model, None, cfg, precision)
    with parallel.cast_weights_once(model, precision, math.ceil(rows_of_rank / n_rows)):
        with parallel.autocast(world.device, precision):
            total = model(ids).sum()  # of the logits: the loss is not compiled
        total.backward()
    total.item()  # waits for the device: a fault of a kernel shows only then

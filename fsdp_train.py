"""Train an MPT: one process on a laptop, or one per GPU on many nodes.

    python fsdp_train.py configs/demo.py
    torchrun --nproc_per_node 4 fsdp_train.py configs/mpt1b.py --run_dir=runs/my1b
    srun --ntasks-per-node=8 --gpus-per-task=1 python fsdp_train.py configs/mpt7b.py

`main` is the recipe, `train_step` is the step. The loss of a step is

    sum of the cross-entropies of the counted tokens / their number

both over the whole global batch. So, up to rounding, it does not matter how the batch is cut into
ranks and microbatches (dropout aside, whose masks depend on both). --z_loss adds its term to the
loss that is trained, not to that of evaluation.

What keeps a run alive and on record (signals, checkpoints, metrics, lost ranks) is one object, the
`Run` of lifecycle/run.py. To learn training, you need not read it: its methods do what they say.

`--help` lists the settings.
"""

import sys

from lifecycle import stopping

if __name__ == "__main__":  # before the imports that take seconds
    stopping.while_loading(sys.argv[1:])

import numpy as np
import torch
from torch.profiler import record_function

import config
import data
import optim
import parallel
import processes
from config import MPTConfig, TrainConfig
from lifecycle.run import Run
from loss import IGNORE


def main(argv) -> None:
    """Train: the recipe, from the settings to the last checkpoint."""
    # settings, and processes: one for each device
    model_cfg, cfg = config.load(argv, MPTConfig, TrainConfig)
    signals = stopping.Signals()  # Ctrl-C and others: the run saves, then stops
    world = processes.start(cfg.device, cfg.collective_timeout, cfg.tp, cfg.pp)

    with Run(model_cfg, cfg, world, signals) as run:
        # data
        dataset = data.Dataset(run.prepare_data(), model_cfg, cfg)
        vals = [part.val for part in dataset.parts]  # one for each source of --mix, else one

        # where to begin: at the newest sound checkpoint, or at step 0
        run.find_start(dataset)
        if run.has_all_steps():
            return run.say_finished()
        cfg, precision = run.settle()  # nothing is "auto" any more

        # model, optimizer
        model, optimizer = parallel.build(model_cfg, cfg, world, precision, run.seed)
        model.separator = dataset.separator
        run.load_weights(model, optimizer)
        run.begin(model)

        # the loop
        if run.validation_is_due():  # of the model as it is before the first step
            run.log_validation([evaluate(model, val, cfg, world, precision) for val in vals])
        run.score_tasks_if_due(model)
        for step, rows in run.steps():
            figures = train_step(model, optimizer, rows, step, cfg, world, precision)
            run.record(step, figures)
            if run.save_is_due():
                run.save(model, optimizer)
            if run.stop_is_asked():
                break
            if run.validation_is_due():
                run.log_validation([evaluate(model, val, cfg, world, precision) for val in vals])
            run.score_tasks_if_due(model)
        run.finish()


def train_step(model, optimizer, rows, step, cfg, world, precision):
    """One update from this rank's rows (B, T + 1). Returns loss, gradient norm, hash of the ids.

    All three are tensors on the device, the norm before clipping. The host does not wait for them
    here, so that a GPU always has work in its queue: `run.record` reads them later. Loss and norm
    are sums over all ranks. So if they are not finite, all ranks leave weights and optimizer as
    they are. The hash tells whether two runs have read the same tokens at a step.
    """
    parallel.seed_dropout(cfg, step, world)
    batch = data.make_batch(rows, cfg, world.dp_rank)  # microbatches of ids and labels
    n_tokens, batch_hash = processes.dp_sum(batch.counts, world)  # of the global batch

    # forward, backward: .grad adds up over the microbatches
    loss_sum = forward_backward(model, batch.microbatches, n_tokens, cfg, world, precision)
    loss = processes.dp_sum(loss_sum, world) / n_tokens

    with record_function("optimizer"):
        # clip: the norm is that of the whole gradient, over all ranks
        parallel.finish_gradients(model)  # only --tp and --pp have left parts to be summed
        grad_norm = parallel.grad_norm(model)
        optim.clip_gradients(model.parameters(), grad_norm, cfg.grad_clip)

        # update, unless the step is bad
        for group in optimizer.param_groups:
            group["lr"] = optim.rate_factor(step, cfg) * optim.peak_rate(group, cfg)
        optim.step_if_good(optimizer, loss.isfinite() & grad_norm.isfinite())
        optimizer.zero_grad()
    return loss, grad_norm, batch_hash


def forward_backward(model, microbatches, n_tokens, cfg, world, precision):
    """Add the gradients of all microbatches to .grad. Returns the sum of the tokens' losses."""
    n = len(microbatches)
    with parallel.run_passes(model, cfg, precision, n) as passes:  # fp32, or matmuls in bf16
        if cfg.pp > 1:  # this rank has some of the layers, and passes microbatches on to others
            import pipeline  # here, since most runs do without

            given = microbatches, n_tokens, cfg.z_loss
            return pipeline.forward_backward(model, *given, world, passes)
        loss_sum = torch.zeros((), device=world.device)
        for i, (ids, labels) in enumerate(microbatches):
            with passes.forward():
                loss = model(ids, labels=labels, z_loss=cfg.z_loss)  # a sum over the tokens
            # n_tokens counts those of all ranks, and fully_shard takes the mean of the ranks'
            # gradients. So with 2 ranks, which have 3 and 5 of 8 tokens:
            #     (2/8 * sum over 3  +  2/8 * sum over 5) / 2  =  sum over 8 / 8
            with passes.backward(is_last=i == n - 1):
                (loss * world.dp_size / n_tokens).backward()
            loss_sum += loss.detach_()  # in place, which frees the graph
        return loss_sum


@torch.no_grad()
def evaluate(model, val: data.Split, cfg: TrainConfig, world, precision: str) -> float:
    """Mean loss in nats per token over the first windows of the validation split. A collective.

    Of a mixture's split, its part of cfg.eval_tokens. With stages, each microbatch passes through
    all of them before the next one starts.
    """
    model.eval()
    n_windows = data.n_evaluated(val, cfg.eval_tokens // max(1, len(cfg.mix)))
    loss_sum = torch.zeros((), device=world.device)
    n_tokens = torch.zeros((), dtype=torch.int64, device=world.device)
    for first in range(0, n_windows, world.dp_size * cfg.microbatch_size):
        first_of_rank = first + world.dp_rank * cfg.microbatch_size
        window_ids = first_of_rank + np.arange(cfg.microbatch_size)
        # Every rank makes the same number of passes: beyond the end it repeats the last window,
        # and ignores it.
        rows = torch.from_numpy(val.windows(np.minimum(window_ids, n_windows - 1)))
        ids, labels = data.inputs_and_labels(rows)
        labels[torch.from_numpy(window_ids >= n_windows)] = IGNORE  # on the CPU: a GPU would wait
        ids, labels = ids.to(world.device), labels.to(world.device)
        with parallel.autocast(world.device, precision), parallel.run_uncompiled(model):
            loss_sum += model(ids, labels=labels)
            n_tokens += (labels != IGNORE).sum()
    model.train()
    parallel.free_gathered_weights(model)
    return processes.dp_sum(loss_sum, world).item() / processes.dp_sum(n_tokens, world).item()


if __name__ == "__main__":
    processes.run(main)

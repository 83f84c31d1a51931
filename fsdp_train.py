"""Train an MPT: one process on a laptop, or one per GPU on many nodes.

    python fsdp_train.py configs/demo.py
    torchrun --nproc_per_node 4 fsdp_train.py configs/mpt1b.py --run_dir=runs/my1b
    srun --ntasks-per-node=8 --gpus-per-task=1 python fsdp_train.py configs/mpt7b.py

`main` is the recipe, `train_step` is the step. The loss of a step is

    sum of the cross-entropies of all tokens / number of counted tokens

both over the whole global batch, so it does not matter how that is cut into ranks and microbatches.
`--help` lists the settings.
"""

import sys

from lifecycle import stopping

if __name__ == "__main__":  # before the imports that take seconds
    stopping.begin(sys.argv[1:])

import gc
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial

import numpy as np
import torch
from torch.profiler import record_function

import checkpoint
import config
import data
import optim
import parallel
import processes
from config import MPTConfig, TrainConfig, require
from lifecycle import microbatch, reporter, resume, runlog
from lifecycle.lease import Lease
from lifecycle.reporter import Reporter
from lifecycle.schedule import Schedule
from lifecycle.watchdog import Guard, StragglerTimer, Watchdog
from loss import IGNORE


def main(argv) -> None:
    # settings, processes
    model_cfg, cfg = config.load(argv, MPTConfig, TrainConfig)
    signals = stopping.Signals()
    world = processes.start(cfg.device, collective_timeout(cfg))
    log = runlog.RunLog(cfg, world.global_rank)
    check_settings(model_cfg, cfg, world)
    lease = Lease(cfg.run_dir)
    processes.rank_zero_decides(lease.take)

    # data
    folder = processes.rank_zero_decides(partial(data.open_or_prepare, cfg))
    dataset = data.Dataset(folder, model_cfg)
    evaluator = Evaluator(model_cfg, cfg, world, dataset)

    # where to begin: at the newest sound checkpoint, or at step 0
    start = resume.find_start(model_cfg, cfg, dataset.fingerprint)
    precision = parallel.choose_precision(cfg, world.device, start.precision)
    schedule = Schedule(cfg, start.skip_steps)
    # From here on cfg says what the run really uses.
    cfg = replace(
        cfg,
        microbatch_size=microbatch.fit(model_cfg, cfg, world, precision, train_step),
        skip_steps=schedule.skips.text,
    )
    peak = reporter.peak_of_all_ranks(cfg, world, precision)
    log.say(reporter.describe_run(model_cfg, cfg, world, precision, peak, dataset, start))

    # model, optimizer
    model, optimizer = parallel.build(model_cfg, cfg, world, precision, start.seed_to_draw(cfg))
    model.separator = evaluator.separator
    checkpointer = checkpoint.Checkpointer(cfg.run_dir, cfg.keep_last, cfg.keep_every)
    load_weights(start, model, optimizer)
    warn_if_slow(optimizer, log)

    # the record of the run, and what protects it
    settings = {**asdict(model_cfg), **asdict(cfg)}
    settings |= {"precision": precision, "data_fingerprint": dataset.fingerprint}
    log.start(
        model_cfg,
        cfg,
        runlog.launch_record(cfg, world, precision, start.checkpoint),
        dataset.tokenizer_file,
        start.step,
    )
    halve = partial(microbatch.halve, model_cfg, cfg, world, precision)
    guard = Guard(
        signals,
        lease,
        Watchdog(world, cfg.timeout_minutes, checkpointer.last_good, halve, start.step),
        StragglerTimer(model, world.device),
    )
    report = Reporter(log, model_cfg, cfg, world, peak, schedule, checkpointer, guard, start.step)

    # the loop
    with guard:
        if start.step == 0:
            evaluator.evaluate(0, schedule, model, precision, log)
        schedule.start_save_clock()
        report.start_clock()
        for step, rows in guard.watch(dataset.batches(schedule.steps_from(start.step), cfg, world)):
            collect_garbage(step - start.step)
            figures = train_step(model, optimizer, rows, step, cfg, world, precision)
            done = step + 1
            agreed = report.record(step, figures, read_now=schedule.reads_now(done))
            lease.check()
            if agreed.save_done:
                checkpointer.finish()
            if schedule.evaluates(done) or schedule.scores_tasks(done):
                evaluator.evaluate(done, schedule, model, precision, log)
                report.start_clock()
            save = (schedule.saves(done) or agreed.save) and not agreed.bad_step
            if save or schedule.is_last(done) or agreed.leave:
                checkpointer.save(done, model, optimizer, settings)
                schedule.start_save_clock()
                report.start_clock()
            if agreed.leave and not schedule.is_last(done):
                stopping.leave(agreed.leave, checkpointer, log)
        checkpointer.finish()
    log.say(runlog.summary(cfg.run_dir, cfg.expect))


def train_step(model, optimizer, rows, step, cfg, world, precision):
    """One update from this rank's rows (B, T + 1). Returns loss, gradient norm, hash of the ids.

    All three stay on the device: nothing is read back here, so that its queue never runs dry. The
    norm is that before clipping. If loss or norm is not finite, on all ranks alike, weights and
    optimizer stay as they are: see optim.update.
    """
    # Dropout: a resumed run with equally many ranks draws the same masks.
    torch.manual_seed(hash((cfg.seed, step, world.dp_rank)) % 2**63)
    ids, labels = rows[:, :-1], rows[:, 1:]
    counts = torch.stack([(labels != IGNORE).sum(), data.batch_hash(rows, world.dp_rank)])
    n_tokens, batch_hash = processes.dp_sum(counts, world)  # of the global batch

    # forward, backward: gradients add up over the microbatches
    loss_sum = torch.zeros((), device=rows.device)
    for first in range(0, len(rows), cfg.microbatch_size):
        end = first + cfg.microbatch_size
        parallel.before_microbatch(model, cfg, last=end >= len(rows))
        with record_function("forward"), parallel.autocast(rows.device, precision):
            loss = model(ids[first:end], labels=labels[first:end], z_loss=cfg.z_loss)  # a sum
        with record_function("backward"):
            # Sharding averages gradients over the data-parallel ranks: undo that.
            (loss * world.dp_size / n_tokens).backward()
        loss_sum += loss.detach()

    # update
    with record_function("optimizer"):
        loss = processes.dp_sum(loss_sum, world) / n_tokens
        grad_norm = parallel.clip_grad_norm(model.parameters(), cfg.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate(step, cfg)
        finite = loss.isfinite() & grad_norm.isfinite()
        # found_inf, GradScaler's hook: fused AdamW reads it on the device and skips the update.
        optim.update(optimizer, finite)
    return loss, grad_norm, batch_hash


class Evaluator:
    """Validation loss and zero-shot tasks. Every rank calls it alike."""

    def __init__(self, model_cfg: MPTConfig, cfg: TrainConfig, world, dataset: data.Dataset):
        """UserError if a task or a tokenizer is missing: now, not hours later."""
        self.cfg, self.world, self.val = cfg, world, dataset.val
        self.tasks, self.tokenizer = [], None
        if cfg.icl_interval or model_cfg.attn_uses_sequence_id:
            from evaluation import zero_shot  # here, since most runs do without

            self.tasks, self.tokenizer = zero_shot.prepare(model_cfg, cfg, dataset.tokenizer_file)
        if cfg.init_from:
            from weights import load

            check = partial(
                load.check_same_tokenizer, cfg.init_from, cfg.tokenizer, dataset.tokenizer_file
            )
            processes.rank_zero_decides(check)

    @property
    def separator(self) -> int | None:
        """The id between packed documents, if the model is to know where they end."""
        return self.tokenizer and self.tokenizer.eot

    def evaluate(self, done: int, schedule: Schedule, model, precision: str, log) -> None:
        """Log a row for each of the two that is due after `done` steps. A collective."""
        if schedule.evaluates(done):
            loss = evaluate(model, self.val, self.cfg, self.world, precision)
            bits = runlog.bits_per_byte(loss, self.val.tokens, self.val.text_bytes)
            log.row({"step": done, "val_loss": loss, "val_bits_per_byte": bits})
        if schedule.scores_tasks(done):
            from evaluation import zero_shot

            scores = zero_shot.evaluate(model, self.tokenizer, self.tasks, self.world, precision)
            log.row({"step": done, "icl": scores})


@torch.no_grad()
def evaluate(model, val: data.Split, cfg: TrainConfig, world, precision: str) -> float:
    """Mean loss in nats per token over the first windows of the validation split. A collective."""
    model.eval()
    n_windows = max(1, min(len(val), cfg.eval_tokens // val.seq_len))
    sums = torch.zeros(2, device=world.device)  # loss, tokens
    for first in range(0, n_windows, world.dp_size * cfg.microbatch_size):
        first_of_rank = first + world.dp_rank * cfg.microbatch_size
        window_ids = first_of_rank + np.arange(cfg.microbatch_size)
        # Every rank makes the same number of passes: beyond the end it repeats the last window,
        # and ignores it.
        rows = torch.from_numpy(val.windows(np.minimum(window_ids, n_windows - 1)))
        rows = rows.to(world.device)
        ids, labels = rows[:, :-1], rows[:, 1:].clone()
        labels[torch.from_numpy(window_ids >= n_windows)] = IGNORE
        with parallel.autocast(rows.device, precision):
            sums += torch.stack([model(ids, labels=labels), (labels != IGNORE).sum()])
    model.train()
    parallel.free_gathered_weights(model)
    loss, n_tokens = processes.dp_sum(sums, world).tolist()
    return loss / n_tokens


def collective_timeout(cfg: TrainConfig) -> timedelta:
    """How long a collective may wait: longer than the watchdog, which can say what is wrong."""
    return max(processes.TIMEOUT, timedelta(minutes=2 * cfg.timeout_minutes))


def check_settings(model_cfg: MPTConfig, cfg: TrainConfig, world) -> None:
    """UserError if the batch does not divide, or if --init_from is another model's."""
    problem = (
        f"global_batch_size {cfg.global_batch_size} is not a multiple of the "
        f"{world.dp_size} data-parallel ranks"
    )
    require(cfg.global_batch_size % world.dp_size == 0, problem)
    if cfg.init_from:
        from weights import load  # here, since most runs do without

        processes.rank_zero_decides(partial(load.check_same_model, cfg.init_from, model_cfg))


def load_weights(start: resume.Start, model, optimizer) -> None:
    """Fill model and optimizer from the checkpoint, or the model from --init_from. A collective."""
    if start.checkpoint:
        checkpoint.load(start.checkpoint, model, optimizer)
    elif start.init_from:
        from weights import load

        load.init_from(model, start.init_from)


def warn_if_slow(optimizer, log) -> None:
    """Say so if the optimizer cannot skip a bad step by itself."""
    if not optim.skips_on_device(optimizer):
        name = type(optimizer).__name__
        log.say(f"{name} cannot skip a bad step by itself, so each step waits for the device")


def collect_garbage(step: int, interval: int = 50) -> None:
    """Python's collector would stop one rank at a time while the others wait: collect together."""
    if step % interval == 0:
        gc.disable()
        gc.collect()


if __name__ == "__main__":
    processes.run(main)

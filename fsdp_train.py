"""Train an MPT: one process on a laptop, or one per GPU on many nodes.

    python fsdp_train.py configs/demo.py
    torchrun --nproc_per_node 4 fsdp_train.py configs/mpt1b.py --run_dir=runs/my1b
    srun --ntasks-per-node=8 --gpus-per-task=1 python fsdp_train.py configs/mpt7b.py

`main` is the recipe, `train_step` is the step. The loss of a step is

    sum of the cross-entropies of the counted tokens / their number

both over the whole global batch. So, up to rounding, it does not matter how the batch is cut into
ranks and microbatches (dropout aside, whose masks depend on both). --z_loss adds its term to the
loss that is trained, not to that of evaluation.
`--help` lists the settings.
"""

import sys

from lifecycle import stopping

if __name__ == "__main__":  # before the imports that take seconds
    stopping.while_loading(sys.argv[1:])

import contextlib
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.profiler import record_function

import checkpoint
import config
import data
import flops
import optim
import parallel
import processes
from config import MPTConfig, TrainConfig
from lifecycle import reporter, resume, runlog
from lifecycle.cadence import Cadence, step_ranges
from lifecycle.lease import Lease
from lifecycle.reporter import Reporter
from lifecycle.watchdog import Guard, StragglerTimer, Watchdog
from loss import IGNORE
from program import require


def main(argv) -> None:
    """Train: the recipe, from settings to the last checkpoint."""
    # settings, processes, the right to write into the run folder
    model_cfg, cfg = config.load(argv, MPTConfig, TrainConfig)
    signals = stopping.Signals()
    world = processes.start(cfg.device, collective_timeout(cfg), cfg.tp, cfg.pp)
    check_settings(model_cfg, cfg, world)
    lease = Lease(cfg.run_dir)
    processes.rank_zero_decides(lease.take)
    lease.mirror = open_mirror(model_cfg, cfg)  # --remote: what is newer there is here now

    # data
    dataset = data.Dataset(open_data(model_cfg, cfg, world), model_cfg, cfg)

    # where to begin: at the newest sound checkpoint, or at step 0
    start = resume.find_start(model_cfg, cfg, dataset.fingerprint)
    if start.step >= cfg.max_steps:
        return say_finished(lease, start, model_cfg, cfg, world)
    # now what was left open is settled: from here on, cfg says what the run really does
    cfg, precision, cadence = resolve_auto(model_cfg, cfg, world, start)
    log = runlog.RunLog(cfg, world.global_rank)
    evaluator = Evaluator(model_cfg, cfg, world, precision, dataset)
    peak = reporter.peak_of_all_ranks(cfg, world, precision)
    log.say(reporter.describe_run(model_cfg, cfg, world, precision, peak, dataset, start))

    # model, optimizer
    model, optimizer = parallel.build(model_cfg, cfg, world, precision, start.seed_to_draw(cfg))
    model.separator = dataset.separator
    checkpointer = checkpoint.Checkpointer(cfg.run_dir, world.device, cfg.keep_last, cfg.keep_every)
    base = load_weights(start, cfg, model, optimizer)  # what adapters are put on, if there are any
    settings = settings_to_save(model_cfg, cfg, base, precision, dataset.fingerprint)
    warn_if_slow(optimizer, log)

    # the record of the run, and what protects it
    launch = runlog.launch_record(cfg, world, precision, start.checkpoint, dataset.epoch_tokens)
    is_evaluated = log.start(model_cfg, cfg, launch, dataset.tokenizer_file, start.step)
    guard = make_guard(signals, lease, model, model_cfg, cfg, world, precision, checkpointer, start)

    # the loop
    with guard:
        if not is_evaluated:  # a new run, or one that was stopped before it was evaluated
            evaluator.log_what_is_due(start.step, model, cadence, log)
        report = Reporter(log, model_cfg, cfg, world, peak, cadence, checkpointer, guard, start)
        batches = dataset.batches(cadence.steps_from(start.step), cfg, world)
        for step, rows in guard.watch(batches):  # a rank that hangs is named
            figures = train_step(model, optimizer, rows, step, cfg, world, precision)
            done = step + 1
            agreed = reporter.agree(world, signals, log, cadence, checkpointer, lease.mirror)
            is_bad = report.record(step, figures, agreed)
            publish_what_is_written(agreed, checkpointer, lease)
            with report.paused():
                if cadence.must_save(done, agreed, is_bad):  # a stop signal asks for a save, too
                    checkpointer.save(done, model, optimizer, settings)
                    cadence.start_save_clock()
                if agreed.stop_signal and not cadence.is_last(done):  # before a long evaluation
                    stopping.leave(agreed.stop_signal, checkpointer, log)
                evaluator.log_what_is_due(done, model, cadence, log)
        checkpointer.finish()
    log.say(runlog.summary(cfg.run_dir, cfg.expect))


def train_step(model, optimizer, rows, step, cfg, world, precision):
    """One update from this rank's rows (B, T + 1). Returns loss, gradient norm, hash of the ids.

    All three are tensors on the device, the norm before clipping. The host does not wait for them
    here, so that a GPU always has work in its queue: Reporter reads them later. Loss and norm are
    sums over all ranks. So if they are not finite, all ranks leave weights and optimizer unchanged.
    The hash tells whether two runs have read the same tokens at a step.
    """
    parallel.seed_dropout(cfg, step, world)
    ids, labels = data.inputs_and_labels(rows)  # the label of a place is the id after it
    n_tokens, batch_hash = count(rows, labels, world)
    microbatches = cut(ids, labels, cfg)

    # forward, backward: .grad adds up over the microbatches
    with parallel.weights_cast_once(model, precision, len(microbatches)):
        loss_sum = forward_backward(model, microbatches, n_tokens, cfg, world, precision)

    # update
    with record_function("optimizer"):
        loss = processes.dp_sum(loss_sum, world) / n_tokens
        parallel.finish_gradients(model)  # only --tp and --pp have left parts to be summed
        grad_norm = parallel.grad_norm(model)
        optim.clip_gradients(model.parameters(), grad_norm, cfg.grad_clip)
        good = loss.isfinite() & grad_norm.isfinite()
        with optim.at_rate(optimizer, optim.rate_factor(step, cfg)):
            optim.step_if_good(optimizer, good)
        optimizer.zero_grad()
    return loss, grad_norm, batch_hash


def forward_backward(model, microbatches, n_tokens, cfg, world, precision):
    """Add the gradients of all microbatches to .grad. Returns the sum of the tokens' losses."""
    if cfg.pp > 1:
        return forward_backward_in_stages(model, microbatches, n_tokens, cfg, world, precision)
    loss_sum = torch.zeros((), device=world.device)
    for number, (ids, labels) in enumerate(microbatches, 1):
        parallel.before_microbatch(model, cfg, last=number == len(microbatches))
        with record_function("forward"), parallel.autocast(world.device, precision):
            loss = model(ids, labels=labels, z_loss=cfg.z_loss)  # a sum over the tokens
        with record_function("backward"):
            # n_tokens counts those of all ranks. fully_shard divides gradients by dp_size, as if
            # each rank had a mean of its own: the factor undoes that.
            (loss * world.dp_size / n_tokens).backward()
        loss_sum += loss.detach_()  # in place, which frees the graph
    return loss_sum


def forward_backward_in_stages(model, microbatches, n_tokens, cfg, world, precision):
    """The same with --pp, for the stage of this rank. Each stage gets the loss of the last one."""
    import pipeline  # here, since most runs do without

    autocast = partial(parallel.autocast, world.device, precision)
    before = partial(parallel.before_microbatch, model, cfg)
    return pipeline.forward_backward(
        model, microbatches, n_tokens, cfg.z_loss, world, autocast, before
    )


def count(rows, labels, world):
    """Learned tokens of the global batch, and the hash of its ids, in one all-reduce."""
    counts = torch.stack([(labels != IGNORE).sum(), data.batch_hash(rows, world.dp_rank)])
    return processes.dp_sum(counts, world)


def cut(ids, labels, cfg) -> list[tuple]:
    """The microbatches [(ids, labels), ...] of a rank's rows (B, T): at most microbatch_size rows.

    Compiled blocks need microbatches of one size. A row that is missing in the last one counts for
    nothing, since its labels are IGNORE.
    """
    size = parallel.microbatch_rows(len(ids), cfg)
    if cfg.compile is True:
        missing = -len(ids) % size
        ids = F.pad(ids, (0, 0, 0, missing))
        labels = F.pad(labels, (0, 0, 0, missing), value=IGNORE)
    return list(zip(ids.split(size), labels.split(size), strict=True))


class Evaluator:
    """Validation loss and zero-shot tasks. All ranks call it together."""

    def __init__(self, model_cfg: MPTConfig, cfg: TrainConfig, world, precision, dataset):
        """UserError if a task or a tokenizer is missing: now, not hours later."""
        self.cfg, self.world, self.precision = cfg, world, precision
        self.parts = dataset.parts
        self.tasks, self.tokenizer = [], None
        if cfg.icl_interval:
            from evaluation import zero_shot  # here, since most runs do without

            self.tasks, self.tokenizer = zero_shot.prepare(model_cfg, cfg, dataset.tokenizer_file)
        if cfg.init_from:
            from weights import load

            check = partial(
                load.check_same_tokenizer, cfg.init_from, cfg.tokenizer, dataset.tokenizer_file
            )
            processes.rank_zero_decides(check)

    def log_what_is_due(self, done: int, model, cadence: Cadence, log) -> None:
        """Log the validation loss, and the tasks, where due after `done` steps. A collective."""
        if cadence.evaluation_due(done):
            log.row({"step": done} | self.validate(model))
        if cadence.tasks_due(done):
            log.row({"step": done, "icl": self.score_tasks(model)})

    def score_tasks(self, model) -> dict:
        """The figures of each task. A collective."""
        from evaluation import zero_shot

        return zero_shot.evaluate(model, self.tokenizer, self.tasks, self.world, self.precision)

    def validate(self, model) -> dict:
        """Validation loss and bits per byte. A collective.

        With a mixture: those of the sources, weighted by their shares of tokens and bytes. Each
        source is evaluated on as many tokens as the others.
        """
        cfg = replace(self.cfg, eval_tokens=self.cfg.eval_tokens // len(self.parts))
        bytes_per_token = sum(p.share * p.val.text_bytes / p.val.learned for p in self.parts)
        losses = {}
        mean_loss = mean_bits = 0.0
        for part in self.parts:
            val = part.val
            loss = evaluate(model, val, cfg, self.world, self.precision)
            losses[part.name] = loss
            mean_loss += part.share * loss
            share_of_bytes = part.share * val.text_bytes / val.learned / bytes_per_token
            mean_bits += share_of_bytes * runlog.bits_per_byte(loss, val.learned, val.text_bytes)
        by_source = {"val_loss_by_source": losses} if cfg.mix else {}
        return {"val_loss": mean_loss, "val_bits_per_byte": mean_bits} | by_source


@torch.no_grad()
def evaluate(model, val: data.Split, cfg: TrainConfig, world, precision: str) -> float:
    """Mean loss in nats per token over the first windows of the validation split. A collective.

    With stages, each microbatch passes through all of them before the next one starts.
    """
    model.eval()
    n_windows = data.n_evaluated(val, cfg.eval_tokens)
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
        with parallel.autocast(world.device, precision), parallel.uncompiled(model):
            loss_sum += model(ids, labels=labels)
            n_tokens += (labels != IGNORE).sum()
    model.train()
    parallel.free_gathered_weights(model)
    return processes.dp_sum(loss_sum, world).item() / processes.dp_sum(n_tokens, world).item()


def resolve_auto(model_cfg: MPTConfig, cfg: TrainConfig, world, start: resume.Start):
    """(cfg, precision, cadence): what the settings leave open, the same on all ranks. A collective.

    The cfg that is returned says what the run really uses.
    """
    precision = parallel.choose_precision(cfg, world.device, start.precision)
    cadence = Cadence(cfg, start.skip_steps)
    cfg = replace(cfg, skip_steps=cadence.skips.text)
    compiles = False
    if cfg.compile is True or world.device.type == "cuda":
        from lifecycle import compiling  # here, since runs on a CPU do without

        compiles = compiling.choose(model_cfg, cfg, world, precision)
    cfg = replace(cfg, compile=compiles)
    record = Path(cfg.run_dir, "microbatch.json")  # of a start that ran out of memory
    if cfg.microbatch_size == "auto" or processes.rank_zero_decides(record.exists):
        from lifecycle import microbatch

        cfg = replace(cfg, microbatch_size=microbatch.fit(model_cfg, cfg, world, precision))
    return cfg, precision, cadence


def make_guard(signals, lease, model, model_cfg, cfg, world, precision, checkpointer, start):
    """What protects the loop: watchdog, timer of stragglers, trackers, copies in a store."""
    # When memory runs out, the watchdog records half of the microbatch for the next start.
    halve = partial(halve_microbatch, model_cfg, cfg, world, precision)
    watchdog = Watchdog(world, cfg.timeout_minutes, checkpointer.last_good, halve, start.step)
    guard = Guard(signals, lease, watchdog, StragglerTimer(model, world.device))
    guard.enter_context(start_trackers(cfg, world))
    if lease.mirror:
        lease.mirror.watch(checkpointer, start.step)
    return guard


def halve_microbatch(model_cfg: MPTConfig, cfg: TrainConfig, world, precision, step: int) -> int:
    """Record half of the microbatch, and return it: see `microbatch.halve`."""
    from lifecycle import microbatch  # here, since most runs do without

    return microbatch.halve(model_cfg, cfg, world, precision, step)


def publish_what_is_written(agreed, checkpointer, lease: Lease) -> None:
    """Publish the last checkpoint once all ranks have written it, and copy it to --remote.

    A collective. UserError if another run has taken the run folder.
    """
    lease.check()
    if agreed.all_saved:
        checkpointer.finish()
    if agreed.all_copied:
        lease.mirror.copy_newest()


def open_data(model_cfg: MPTConfig, cfg: TrainConfig, world) -> list[Path]:
    """The checked data folders; of data in a store, the copy on this node. A collective."""
    folders = processes.rank_zero_decides(partial(data.open_or_prepare, cfg, model_cfg.max_seq_len))
    if "://" in cfg.data_dir:
        from text import fetch  # here, since most runs do without

        processes.each_node_does(partial(fetch.copy, cfg.data_dir, *folders), world)
    return folders


def open_mirror(model_cfg: MPTConfig, cfg: TrainConfig):
    """The mirror of the run folder in a store; None without --remote. A collective."""
    if not cfg.remote:
        return None
    from lifecycle import remote  # here, since most runs do without

    mirror = remote.open_mirror(model_cfg, cfg)
    check_init_from(model_cfg, cfg)
    return mirror


def collective_timeout(cfg: TrainConfig) -> timedelta:
    """How long a collective may wait: so long that the watchdog, which says more, acts first."""
    return max(processes.TIMEOUT, timedelta(minutes=2 * cfg.timeout_minutes))


def check_settings(model_cfg: MPTConfig, cfg: TrainConfig, world) -> None:
    """UserError if ranks cannot share the batch evenly, or --init_from is another model's."""
    batch, dp = cfg.global_batch_size, world.dp_size
    nearest = [n for n in (batch - batch % dp, batch - batch % dp + dp) if n > 0]
    require(
        batch % dp == 0,
        f"global_batch_size {batch} is not a multiple of the {dp} data-parallel ranks: "
        f"set --global_batch_size={' or '.join(map(str, nearest))}",
    )
    parallel.check(model_cfg, cfg)
    data.check_packing(model_cfg, cfg)
    flops.check_adapters(model_cfg, cfg)
    step_ranges(cfg.skip_steps)
    if cfg.track:
        from lifecycle import trackers  # here, since most runs do without

        processes.rank_zero_decides(partial(trackers.require_installed, cfg.track))
    if not cfg.remote:  # else checkpoints that replace it may be there
        check_init_from(model_cfg, cfg)


def check_init_from(model_cfg: MPTConfig, cfg: TrainConfig) -> None:
    """UserError if --init_from is missing or another model's. A collective."""
    if cfg.init_from:
        from weights import load  # here, since most runs do without

        processes.rank_zero_decides(partial(load.check_init_from, cfg, model_cfg))


def start_trackers(cfg: TrainConfig, world):
    """A context in which the processes that feed --track run, beside rank 0."""
    if not cfg.track or world.global_rank > 0:
        return contextlib.nullcontext()
    from lifecycle import trackers  # here, since most runs do without

    return trackers.fed(cfg.run_dir, cfg.track)


def load_weights(start: resume.Start, cfg: TrainConfig, model, optimizer) -> dict:
    """Fill model and optimizer from the checkpoint, or the model from --init_from. A collective.

    A checkpoint of adapters lacks the weights of their base, which are loaded first. Returns what
    the next checkpoints will say of the base (nothing without adapters): see `load.base_of`.
    """
    base = find_base(start, cfg)
    # A new run's first weights, or the frozen base of adapters, which checkpoints lack.
    if start.init_from and (base or not start.checkpoint):
        from weights import load  # here, since most runs do without

        path = base.get("base", start.init_from)
        if base and not start.checkpoint:
            load.warn_if_it_may_go(path)
        load.init_from(model, path)
        processes.rank_zero_decides(partial(load.keep_generation, path, cfg.run_dir))
    if start.checkpoint:
        checkpoint.load(start.checkpoint, model, optimizer)
    return base


def find_base(start: resume.Start, cfg: TrainConfig) -> dict:
    """The base of a run with adapters, as of `load.base_of`; nothing for another. A collective."""
    if not cfg.lora_rank:
        return {}
    from weights import load  # here, since most runs do without

    fix = "set --init_from to them"
    if start.step >= cfg.max_steps:
        fix += ", or --resume=again to train anew"
    return processes.rank_zero_decides(partial(load.base_of, start.init_from, start.meta, fix))


def settings_to_save(model_cfg: MPTConfig, cfg: TrainConfig, base: dict, precision, fingerprint):
    """What each checkpoint says of its run. base: see `load_weights`; fingerprint: of the data."""
    settings = {**asdict(model_cfg), **asdict(cfg), **base}
    return settings | {"precision": precision, "data_fingerprint": fingerprint}


def say_finished(lease: Lease, start: resume.Start, model_cfg, cfg: TrainConfig, world) -> None:
    """Say that the run has all its steps. UserError if cfg would have made another run."""
    with lease:
        find_base(start, cfg)  # UserError if --init_from is not its base any more
        line = resume.finished(start, model_cfg, cfg)
        if world.global_rank == 0:
            print(line, flush=True)


def warn_if_slow(optimizer, log) -> None:
    """Say so if the optimizer cannot skip a bad step by itself."""
    if not optim.skips_on_device(optimizer):
        name = type(optimizer).__name__
        log.say(f"{name} cannot skip a bad step by itself, so each step waits for the device")


if __name__ == "__main__":
    processes.run(main)

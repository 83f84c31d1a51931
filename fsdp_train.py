"""Train an MPT: one process on a laptop, or one per GPU on many nodes. `main` is the recipe, `train_step` the step.

    python fsdp_train.py configs/demo.py
    torchrun --nproc_per_node 4 fsdp_train.py configs/mpt1b.py --run_dir=runs/my1b --microbatch_size=2
    srun --ntasks-per-node=8 --gpus-per-task=1 python fsdp_train.py configs/mpt7b.py

Loss of a step = sum of the token cross-entropies / number of counted tokens, both over the whole global batch, so it
does not matter how the batch was cut into ranks and microbatches. `--help` lists the settings.
Read next: generate.py.
"""

import sys

from lifecycle import startup

if __name__ == "__main__":  # before the imports that take seconds
    startup.begin(sys.argv[1:])

import collections
import gc
import time
from dataclasses import asdict, replace
from datetime import timedelta

import numpy as np
import torch
from torch.profiler import record_function

import checkpoint
import config
import data
import devices
import flops
import optim
import parallel
import processes
from config import MPTConfig, TrainConfig, require
from lifecycle import microbatch, resume, runlog, stopping, watchdog
from lifecycle.lease import Lease
from loss import IGNORE


def main(argv) -> None:
    model_cfg, cfg = config.load(argv, MPTConfig, TrainConfig)
    signals = stopping.Signals()
    world = processes.start(
        cfg.device, max(processes.TIMEOUT, timedelta(minutes=2 * cfg.timeout_minutes))
    )
    log = runlog.RunLog(cfg, world.global_rank)
    rest = cfg.global_batch_size % world.dp_size
    require(
        rest == 0,
        f"global_batch_size {cfg.global_batch_size} is not a multiple of the {world.dp_size} data-parallel ranks",
    )
    if cfg.init_from:
        from weights import load  # here, since most runs do without

        processes.rank_zero_decides(lambda: load.check_same_model(cfg.init_from, model_cfg))
    lease = Lease(cfg.run_dir)
    processes.rank_zero_decides(lease.take)

    # data
    folder = processes.rank_zero_decides(lambda: data.open_or_prepare(cfg))
    train = data.Split(folder, "train", model_cfg.max_seq_len)
    val = data.Split(folder, "val", model_cfg.max_seq_len)
    fingerprint = data.read_summary(folder)["fingerprint"]
    require(
        train.vocab_size <= model_cfg.vocab_size,
        f"vocab_size {model_cfg.vocab_size} is less than the {train.vocab_size} ids of {folder}: raise it",
    )
    tokens_file = folder / "tokenizer.json"  # of a tokenizer that has one
    tasks, tokenizer = tasks_and_tokenizer(model_cfg, cfg, tokens_file)
    if cfg.init_from:
        processes.rank_zero_decides(
            lambda: load.check_same_tokenizer(cfg.init_from, cfg.tokenizer, tokens_file)
        )

    # where to begin
    found = resume.choose(cfg)
    saved = checkpoint.read_meta(found) if found else {}
    if found:
        resume.check_same(found, saved, model_cfg, cfg, fingerprint)
    first = saved.get("step", 0)
    precision = parallel.choose_precision(cfg, world.device, saved.get("precision"))
    skips = stopping.Skips(cfg, saved.get("skip_steps", ""))
    microbatch_size = microbatch.fit(model_cfg, cfg, world, precision, train_step)
    cfg = replace(cfg, microbatch_size=microbatch_size, skip_steps=skips.text)
    peak = resume.peak_of_all_ranks(cfg, world, precision)
    log.say(resume.opening(model_cfg, cfg, world, precision, folder, train, found, first, peak))

    # model, optimizer
    seed = None if found or cfg.init_from else cfg.seed
    model, optimizer = parallel.build(model_cfg, cfg, world, precision, seed)
    model.separator = tokenizer and tokenizer.eot
    saver = checkpoint.Checkpointer(cfg.run_dir, cfg.keep_last, cfg.keep_every)
    if found:
        checkpoint.load(found, model, optimizer)
    elif cfg.init_from:
        load.init_from(model, cfg.init_from)

    # what is written down
    settings = {
        **asdict(model_cfg),
        **asdict(cfg),
        "precision": precision,
        "data_fingerprint": fingerprint,
    }
    launch = {
        "ranks": world.global_size,
        "device": devices.describe(world.device),
        "precision": precision,
        "microbatch_size": cfg.microbatch_size,
        "skip_steps": cfg.skip_steps,
        "resumed": found and str(found),
    }
    processes.rank_zero_decides(lambda: log.start(model_cfg, cfg, launch, tokens_file, first))
    if not optim.skips_on_device(optimizer):
        log.say(
            f"{type(optimizer).__name__} cannot leave out a bad step by itself, so each step waits for the device"
        )

    def due(every, step):
        return every and (step % every == 0 or step == cfg.max_steps)

    def evaluate_now(step):
        if due(cfg.eval_interval or cfg.max_steps, step):
            loss = evaluate(model, val, cfg, world, precision)
            bits = runlog.bits_per_byte(loss, val.tokens, val.text_bytes)
            log.row({"step": step, "val_loss": loss, "val_bits_per_byte": bits})
        if due(cfg.icl_interval, step):
            from evaluation import zero_shot  # `tasks_and_tokenizer` did so

            log.row(
                {"step": step, "icl": zero_shot.evaluate(model, tokenizer, tasks, world, precision)}
            )

    def rows_of(step):
        return train.batch(cfg.seed, step, cfg.global_batch_size, world.dp_rank, world.dp_size)

    def halve():
        return microbatch.halve(model_cfg, cfg, world, precision, step + 1)

    def report(step, result, own_seconds):
        """Meet the other ranks after a step, write it down. `result` is read here: the one wait for the device."""
        nonlocal begin
        loss, grad_norm, batch_hash = result()
        batch_hash = f"{batch_hash % 2**64:016x}"
        seconds, begin = time.perf_counter() - begin, time.perf_counter()
        done, rate = step + 1, tokens / seconds
        bad = bad_steps.see(done, loss, grad_norm, batch_hash)
        to_save = 0 < 60 * cfg.save_minutes < time.monotonic() - saved_at
        met = stopping.meet(
            world, signals.asked or log.asked, to_save, saver.settled(), own_seconds()
        )
        log.row(
            {
                "step": done,
                "tokens": (done - skips.before(done)) * tokens,
                "loss": loss,
                "lr": optim.learning_rate(step, cfg),
                "grad_norm": grad_norm,
                "batch_hash": batch_hash,
                "skipped": bad,
                "tokens_per_second": rate,
                "mfu": flops.mfu(model_cfg, rate, 1, peak),
                "memory_gb": runlog.memory_gb(world.device),
                "seconds": seconds,
                "slowest_rank": met.slowest_rank,
                "slowest_by": met.slowest_by,
            }
        )
        bad_steps.check()
        return met

    # the loop
    tokens = cfg.global_batch_size * model_cfg.max_seq_len  # of a step
    late = (
        1 if world.device.type == "cuda" else 0
    )  # steps that are queued before the one before them is read
    unread, step, met = collections.deque(), first, stopping.Met()
    pace, bad_steps = (
        stopping.Pace(model, world.device),
        stopping.BadSteps(cfg, saver, skips, first),
    )
    signals.at_once = False
    with lease, watchdog.Watch(world, cfg.timeout_minutes, saver.last_good, halve) as watching:
        if first == 0:
            evaluate_now(0)
        begin, saved_at = time.perf_counter(), time.monotonic()
        for step, rows in pace.timed(
            data.prefetch(rows_of, skips.steps(first, cfg.max_steps), world.device)
        ):
            collect_garbage(step - first)
            result = runlog.start_reading(
                *train_step(model, optimizer, rows, step, cfg, world, precision)
            )
            unread.append((step, result, pace.take()))
            done = step + 1
            last = done == cfg.max_steps
            evaluates = last or due(cfg.eval_interval, done) or due(cfg.icl_interval, done)
            saves = last or any(
                every and done % every == 0 for every in (cfg.save_interval, cfg.keep_every)
            )
            while unread and (len(unread) > late or evaluates or saves or met.save or met.leave):
                met = report(*unread.popleft())
            lease.check()
            if met.settled:
                saver.finish()
            if evaluates:
                evaluate_now(done)
                begin = time.perf_counter()
            if (
                last or met.leave or ((saves or met.save) and not bad_steps.count)
            ):  # good checkpoints stay
                saver.save(done, model, optimizer, settings)
                met, saved_at, begin = (
                    stopping.Met(leave=met.leave),
                    time.monotonic(),
                    time.perf_counter(),
                )
            if met.leave and not last:
                saver.finish()
                log.say(f"asked to leave: {saver.last_good()}. The same command goes on from there")
                stopping.leave(met.leave)
            watching.step()
        saver.finish()
    log.say(runlog.summary(cfg.run_dir, cfg.expect))


def tasks_and_tokenizer(model_cfg, cfg, tokens_file):
    """For evaluation on tasks, and for packed documents. Most runs do without, and import nothing."""
    if not (cfg.icl_interval or model_cfg.attn_uses_sequence_id):
        return [], None
    from evaluation import zero_shot

    return zero_shot.prepare(model_cfg, cfg, tokens_file)


def train_step(model, optimizer, rows, step, cfg, world, precision):
    """One update from this rank's rows (B, T + 1). Returns loss, gradient norm before clipping, hash of the ids.

    They stay on the device: nothing is read back here, so its queue never runs dry between microbatches. If the loss or
    the norm is not finite, on all ranks alike, weights and optimizer stay as they are: see optim.update.
    """
    torch.manual_seed(
        hash((cfg.seed, step, world.dp_rank)) % 2**63
    )  # dropout: on as many ranks the same masks again
    ids, labels = rows[:, :-1], rows[:, 1:]
    counted = torch.stack([(labels != IGNORE).sum(), data.batch_hash(rows, world.dp_rank)])
    tokens, batch_hash = processes.dp_sum(counted, world)  # over the global batch
    loss_sum = torch.zeros((), device=rows.device)
    for begin in range(0, len(rows), cfg.microbatch_size):
        end = begin + cfg.microbatch_size
        parallel.before_microbatch(model, cfg, last=end >= len(rows))
        with record_function("forward"), parallel.autocast(rows.device, precision):
            loss = model(
                ids[begin:end], labels=labels[begin:end], z_loss=cfg.z_loss
            )  # a sum over tokens
        with record_function("backward"):
            (
                loss * world.dp_size / tokens
            ).backward()  # sharding averages gradients over the data-parallel ranks: undo that
        loss_sum += loss.detach()
    with record_function("optimizer"):
        loss = processes.dp_sum(loss_sum, world) / tokens
        grad_norm = parallel.clip_grad_norm(model.parameters(), cfg.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate(step, cfg)
        optim.update(optimizer, loss.isfinite() & grad_norm.isfinite())
    return loss, grad_norm, batch_hash


def collect_garbage(step, interval=50):
    """Python's collector would stop one rank at a time, and the others wait for it: all collect together instead."""
    if step % interval == 0:
        gc.disable()
        gc.collect()


@torch.no_grad()
def evaluate(model, val, cfg, world, precision) -> float:
    """Mean loss in nats a token over the first windows of the validation split, shared by the ranks."""
    model.eval()
    n_windows = max(1, min(len(val), cfg.eval_tokens // val.seq_len))
    sums = torch.zeros(2, device=world.device)  # loss, tokens
    for first in range(0, n_windows, world.dp_size * cfg.microbatch_size):
        numbers = first + world.dp_rank * cfg.microbatch_size + np.arange(cfg.microbatch_size)
        rows = torch.from_numpy(val.windows(np.minimum(numbers, n_windows - 1))).to(world.device)
        ids, labels = rows[:, :-1], rows[:, 1:].clone()
        labels[torch.from_numpy(numbers >= n_windows)] = (
            IGNORE  # every rank makes the same number of passes
        )
        with parallel.autocast(rows.device, precision):
            sums += torch.stack([model(ids, labels=labels), (labels != IGNORE).sum()])
    model.train()
    parallel.free_gathered_weights(model)
    loss, tokens = processes.dp_sum(sums, world).tolist()
    return loss / tokens


if __name__ == "__main__":
    processes.run(main)

"""A run: what keeps it alive and on record, behind one object.

`fsdp_train.main` calls these methods of `Run`, in this order. Whoever wants to learn training may
skip this file. Whoever operates a run finds here what happens when, and in which file:

    with Run(...) as run    the settings fit, and the run folder is ours     lease, remote
    prepare_data            tokens are made, or copied from a store          ../text/
    find_start              the newest sound checkpoint, or step 0           resume
    settle                  what was left open: precision, compile,          beginning, compiling,
                            microbatch; then the run says what it will do    microbatch
    load_weights            those of the checkpoint, or of --init_from       beginning
    begin                   from here on the run is on record, and watched   runlog, watchdog
    steps                   the batches; a rank that hangs is named          watchdog
    record                  the ranks agree on what follows; a row           runlog
    save_is_due, save       at intervals, and before the run stops           ../checkpoint.py
    stop_is_asked           a signal to one rank stops all at the same step  stopping
    validation_is_due, log_validation, score_tasks_if_due                    ../evaluation/
    finish                  the last save; after a signal its exit status    stopping

The figures of a step are read late:

    queue step n + 1 on the GPU -> the ranks agree -> read the figures of step n -> log a row

This logging lag of one step means that a GPU never waits for the host. A CPU has no queue, so there
a step is read immediately.

Steps are counted in two ways: `step` is 0 for the first one, as in the order of the data and in the
learning rate; `done` is the number of steps that are finished, so it is step + 1 after a step.
"""

import collections
import contextlib
import math
import time
from dataclasses import asdict, dataclass, replace

import torch

import checkpoint
import flops
import optim
import processes
from config import MPTConfig, TrainConfig, step_ranges
from lifecycle import beginning, resume, runlog, stopping
from lifecycle.lease import Lease
from lifecycle.watchdog import StragglerTimer, Watchdog, collect_garbage
from processes import rank_zero_decides
from program import UserError, require


class Run:
    """A run of `fsdp_train.main` on one rank, as a context. All ranks call the same methods."""

    def __init__(self, model_cfg: MPTConfig, cfg: TrainConfig, world, signals):
        self.model_cfg, self.cfg, self.world, self.signals = model_cfg, cfg, world, signals
        self.agreed = StepConsensus()
        self.last_read_is_bad = False  # on a GPU that is an earlier step than the last one
        self.is_finished = False

    def __enter__(self):
        """UserError if the settings do not fit, or another run owns the folder or its copy."""
        beginning.check_settings(self.model_cfg, self.cfg, self.world)
        with contextlib.ExitStack() as entered:
            self.lease = entered.enter_context(Lease(self.cfg.run_dir))
            rank_zero_decides(self.lease.take)
            self.lease.mirror = beginning.open_mirror(self.model_cfg, self.cfg)
            self.ends_with_run = entered.pop_all()
        return self

    def __exit__(self, *error) -> None:
        """End what protects the run: watchdog, trackers, mirror and lease, in this order."""
        try:
            self.ends_with_run.__exit__(*error)
        finally:
            if self.is_finished:
                self.log.say(runlog.summary(self.cfg.run_dir, self.cfg.expect))

    # --- Before the first step

    def prepare_data(self) -> list:
        """The checked data folders. A collective."""
        return beginning.prepare_data(self.model_cfg, self.cfg, self.world)

    def find_start(self, dataset) -> None:
        """Choose the checkpoint to go on from, or step 0. UserError if none can be chosen."""
        self.dataset = dataset
        self.start = resume.find_start(self.model_cfg, self.cfg, dataset.fingerprint)
        self.done = self.start.step

    def has_all_steps(self) -> bool:
        """Was the run finished before?"""
        return self.done >= self.cfg.max_steps

    def say_finished(self) -> None:
        """Say that nothing is left to do. UserError if the settings would make another run."""
        beginning.find_base(self.start, self.cfg)  # UserError if --init_from is not its base now
        line = resume.finished(self.start, self.model_cfg, self.cfg)
        if self.lease.mirror:
            self.lease.mirror.end_together(is_stopped=False)
        if self.world.global_rank == 0:
            print(line, flush=True)

    def settle(self) -> tuple[TrainConfig, str]:
        """(cfg, precision): what the settings left open, the same on all ranks.

        From here on, cfg says what the run really does. Rank 0 prints what that is.
        """
        self.skips = Skips(self.cfg, self.start.skip_steps)
        cfg = replace(self.cfg, skip_steps=self.skips.text)
        cfg, precision = beginning.settle(self.model_cfg, cfg, self.world, self.start)
        self.cfg, self.precision = cfg, precision
        self.log = runlog.RunLog(cfg, self.world.global_rank)
        self.tasks, self.tokenizer = beginning.prepare_evaluation(
            self.model_cfg, cfg, self.dataset.tokenizer_file
        )
        self.peak = beginning.peak_of_all_ranks(cfg, self.world, precision)
        what = self.model_cfg, cfg, self.world, precision, self.peak, self.dataset, self.start
        self.log.say(beginning.describe_run(*what))
        return cfg, precision

    @property
    def seed(self) -> int | None:
        """The seed of new weights; None if weights will be loaded."""
        return self.start.seed_to_draw(self.cfg)

    def load_weights(self, model, optimizer) -> None:
        """Load those of the checkpoint, with the optimizer's state, or of --init_from."""
        cfg = self.cfg
        base = beginning.load_weights(self.start, cfg, model, optimizer)
        self.settings = {**asdict(self.model_cfg), **asdict(cfg), **base}  # of each checkpoint
        fingerprint = self.dataset.fingerprint
        self.settings |= {"precision": self.precision, "data_fingerprint": fingerprint}
        if not optim.skips_on_device(optimizer):
            name = type(optimizer).__name__
            words = "cannot skip a bad step by itself, so each step waits for the device"
            self.log.say(f"{name} {words}")

    def begin(self, model) -> None:
        """Put this launch on record, and watch over it.

        From here on signals wait for a save, and a rank that hangs or fails is named.
        """
        cfg, world, dataset = self.cfg, self.world, self.dataset
        resumed = self.start.checkpoint
        launch = runlog.launch_record(cfg, world, self.precision, resumed, dataset.epoch_tokens)
        tokenizer_file = dataset.tokenizer_file
        self.is_evaluated = self.log.start(self.model_cfg, cfg, launch, tokenizer_file, self.done)
        kept = cfg.keep_last, cfg.keep_every
        self.checkpointer = checkpoint.Checkpointer(cfg.run_dir, world.device, *kept)
        self.timer = StragglerTimer(model, world.device)
        # When memory runs out, the watchdog records half of the microbatch for the next start.
        last_good, halve = self.checkpointer.last_good, self.halve_microbatch
        self.watchdog = Watchdog(world, cfg.timeout_minutes, last_good, halve, self.done)
        if cfg.track and world.global_rank == 0:
            from lifecycle import trackers  # here, since most runs do without

            self.ends_with_run.enter_context(trackers.fed(cfg.run_dir, cfg.track))
        if self.lease.mirror:
            self.lease.mirror.watch(self.checkpointer, self.done)
        self.reader = LateReader(self)
        self.saved_at = time.monotonic()
        self.signals.nothing_to_save = False
        self.ends_with_run.enter_context(self.watchdog)

    def halve_microbatch(self, step: int) -> int:
        """Record half of the microbatch, and return it: see `microbatch.halve`."""
        from lifecycle import microbatch  # here, since most runs do without

        settled = self.model_cfg, self.cfg, self.world, self.precision
        return microbatch.halve(*settled, step)

    # --- The loop

    def steps(self):
        """Yield (step, rows (B, T + 1) of this rank), from the first step to the last.

        It times the wait for each batch, and the watchdog sees a heartbeat after each step.
        """
        steps = self.skips.steps(self.done, self.cfg.max_steps)
        batches = self.dataset.batches(steps, self.cfg, self.world)
        self.reader.start_clock()
        begin = time.perf_counter()
        for number, (step, rows) in enumerate(batches):
            self.timer.reading_seconds = time.perf_counter() - begin
            self.watchdog.step = step
            collect_garbage(number)
            yield step, rows
            self.watchdog.heartbeat()
            self.reader.start_clock()
            begin = time.perf_counter()

    def record(self, step: int, figures) -> None:
        """Take (loss, gradient norm, batch hash) of the step just queued; agree on what follows.

        Publishes the last checkpoint once all ranks have written it, and copies it to --remote.
        UserError after too many bad steps, or if another run has taken the run folder.
        """
        self.done = step + 1
        self.is_evaluated = False
        self.agreed = self.agree()
        self.last_read_is_bad = self.reader.record(step, figures, self.agreed)
        self.lease.check()
        if self.agreed.all_saved:
            self.checkpointer.finish()
        if self.lease.mirror:
            self.lease.mirror.copy_newest()

    def agree(self) -> "StepConsensus":
        """Combine what each rank wants: any rank's stop or save applies to all. A collective."""
        minutes = (time.monotonic() - self.saved_at) / 60
        own = [
            self.signals.stop_signal or self.log.stop_signal,
            0 < self.cfg.save_minutes < minutes,
            not self.checkpointer.settled(),
        ]
        # An all-reduce between the CPUs, for which no GPU waits.
        stop_signal, save, writing = map(int, processes.all_max(own, self.world))
        return StepConsensus(stop_signal, bool(save), not writing)

    def save_is_due(self) -> bool:
        """Save now? After bad steps older checkpoints are worth more, unless the run ends."""
        is_due = save_due(self.cfg, self.done) or self.agreed.save
        run_ends = self.done == self.cfg.max_steps or self.agreed.stop_signal
        return bool(run_ends or (is_due and not self.last_read_is_bad))

    def save(self, model, optimizer) -> None:
        """Copy model and optimizer to host memory. A thread writes them while training goes on."""
        self.checkpointer.save(self.done, model, optimizer, self.settings)
        self.saved_at = time.monotonic()

    def stop_is_asked(self) -> bool:
        """Has a signal to any rank asked the run to stop before its last step?"""
        return bool(self.agreed.stop_signal) and self.done < self.cfg.max_steps

    def validation_is_due(self) -> bool:
        """Is the validation loss due, and not on record yet?"""
        return self.cfg.evaluation_due(self.done) and not self.is_evaluated

    def log_validation(self, losses: list[float]) -> None:
        """losses: of each source of the data, in nats per token."""
        self.log.row({"step": self.done} | validation_row(self.dataset.parts, losses, self.cfg))

    def score_tasks_if_due(self, model) -> None:
        """Score the zero-shot tasks of --icl_tasks every --icl_interval steps. A collective."""
        if self.cfg.tasks_due(self.done) and not self.is_evaluated:
            from evaluation import zero_shot  # here, since most runs do without

            given = self.tokenizer, self.tasks, self.world, self.precision
            self.log.row({"step": self.done, "icl": zero_shot.evaluate(model, *given)})

    def finish(self) -> None:
        """Wait for the last save. After a signal this ends the rank with its exit status."""
        if self.lease.mirror:
            self.lease.mirror.end_together(is_stopped=self.stop_is_asked())
        if self.stop_is_asked():
            stopping.leave(self.agreed.stop_signal, self.checkpointer, self.log)
        self.checkpointer.finish()
        self.is_finished = True


@dataclass
class StepConsensus:
    """What the ranks have agreed on after a step. The default asks for nothing."""

    stop_signal: int = 0  # stop the run: the number of the signal that a rank received
    save: bool = False  # save now: --save_minutes have passed
    all_saved: bool = False  # no rank is still writing a checkpoint


def save_due(cfg: TrainConfig, done: int) -> bool:
    """Is a checkpoint due, by the number of steps?"""
    intervals = filter(None, (cfg.save_interval, cfg.keep_every))
    return done == cfg.max_steps or (done > 0 and any(done % every == 0 for every in intervals))


def validation_row(parts: list, losses: list[float], cfg: TrainConfig) -> dict:
    """The loss and bits per byte of the validation splits of `parts`.

    With a mixture: those of the sources, weighted by their shares of tokens and bytes.
    """
    bytes_per_token = sum(part.share * part.val.text_bytes / part.val.learned for part in parts)
    mean_loss = mean_bits = 0.0
    for part, loss in zip(parts, losses, strict=True):
        val = part.val
        mean_loss += part.share * loss
        share_of_bytes = part.share * val.text_bytes / val.learned / bytes_per_token
        mean_bits += share_of_bytes * runlog.bits_per_byte(loss, val.learned, val.text_bytes)
    row = {"val_loss": mean_loss, "val_bits_per_byte": mean_bits}
    if cfg.mix:
        names = [part.name for part in parts]
        row["val_loss_by_source"] = dict(zip(names, losses, strict=True))
    return row


# --------------------------------------------------------------------------------------------------
# The figures of a step


class LateReader:
    """Reads the figures of each step, on a GPU one step late, and logs its row."""

    def __init__(self, run: Run):
        """run: one that is about to take its first step."""
        self.log, self.model_cfg, self.cfg, self.world = run.log, run.model_cfg, run.cfg, run.world
        self.peak, self.timer = run.peak, run.timer
        self.flops_per_token, _ = flops.flops_of(self.model_cfg, train=self.cfg)
        self.bad_steps = BadSteps(self.cfg, run.checkpointer, run.skips, run.done)
        self.steps_taken = sum(1 for _ in run.skips.steps(0, run.done))
        self.lag = 1 if self.world.device.type == "cuda" else 0  # steps queued before one is read
        self.unread = collections.deque()
        self.start_clock()

    def start_clock(self) -> None:
        """A step begins. What was done since the last one, such as an evaluation, is not counted.

        Nothing but training is done while a step is unread on a GPU: then the clock goes on.
        """
        if not self.unread:
            self.clock = time.perf_counter()

    def record(self, step: int, figures, agreed: StepConsensus) -> bool:
        """Take the (loss, gradient norm, batch hash) of a step that was just queued, and log the
        steps whose turn it is: all of them if a save or an evaluation follows. A collective.

        Returns whether the last step that was read is bad. UserError after too many bad steps.
        """
        self.unread.append((step, start_reading(*figures), self.timer.take()))
        cfg, done = self.cfg, step + 1
        is_followed = cfg.evaluation_due(done) or cfg.tasks_due(done) or save_due(cfg, done)
        read_now = bool(is_followed or agreed.save or agreed.stop_signal)
        is_bad = False
        while len(self.unread) > (0 if read_now else self.lag):
            oldest = self.unread.popleft()
            is_bad = self.log_step(*oldest, always_shown=read_now and not self.unread)
        return is_bad

    def log_step(self, step: int, read_figures, own_seconds, always_shown: bool) -> bool:
        """Read one step and log its row. Returns whether it is bad."""
        loss, grad_norm, batch_hash = read_figures()  # the one wait for the device
        batch_hash = f"{batch_hash % 2**64:016x}"
        now = time.perf_counter()
        step_seconds, self.clock = now - self.clock, now
        is_bad = self.bad_steps.count(step + 1, loss, grad_norm, batch_hash)
        memory_gb, slowest_rank, slowest_by = of_all_ranks(
            self.world, own_seconds(), runlog.memory_gb(self.world.device)
        )

        tokens = self.cfg.global_batch_size * self.model_cfg.max_seq_len  # of a step
        self.steps_taken += 1
        tokens_per_second = tokens / step_seconds
        row = {
            "step": step + 1,
            "tokens": self.steps_taken * tokens,
            "loss": loss,
            "lr": optim.learning_rate(step, self.cfg),
            "grad_norm": grad_norm,
            "batch_hash": batch_hash,
            "skipped": is_bad,
            "tokens_per_second": tokens_per_second,
            "mfu": flops.utilization(self.flops_per_token, tokens_per_second, 1, self.peak),
            "memory_gb": memory_gb,
            "seconds": step_seconds,
            "slowest_rank": slowest_rank,
            "slowest_by": slowest_by,
        }
        self.log.row(row, always_shown or is_bad)
        self.bad_steps.check()
        return is_bad


def start_reading(*figures: torch.Tensor):
    """Start copying a step's figures to the host. Returns a function that waits for them.

    Call that after the next step is queued: then the GPU never waits for the host.
    """
    on_gpu = figures[0].is_cuda
    copies = [figure.to("cpu", non_blocking=on_gpu) for figure in figures]
    copied = torch.cuda.current_stream().record_event() if on_gpu else None

    def read() -> list:
        if copied:
            copied.synchronize()
        return [copy.item() for copy in copies]

    return read


def of_all_ranks(world, seconds: float, memory_gb: float) -> tuple[float, int, float]:
    """(memory_gb, slowest_rank, slowest_by) of a step. A collective.

    seconds: this rank's time outside collectives. The straggler is the global rank with the
    longest, `slowest_by` times that of the fastest. memory_gb: this rank's peak; the largest of
    all is returned.
    """
    own = [0.0] * world.global_size
    own[world.global_rank] = seconds
    memory_gb, *of_ranks = processes.all_max([memory_gb, *own], world)
    of_ranks = [max(seconds, 1e-6) for seconds in of_ranks]
    slowest = max(of_ranks)
    return memory_gb, of_ranks.index(slowest), round(slowest / min(of_ranks), 2)


# --------------------------------------------------------------------------------------------------
# Steps that are skipped, and bad ones


class Skips:
    """The steps that a run skips together with their batches: --skip_steps now and in the past.

    text: all of them, as --skip_steps takes them.
    """

    def __init__(self, cfg: TrainConfig, skips_of_checkpoint: str = ""):
        """skips_of_checkpoint: the --skip_steps that the checkpoint was trained with. UserError if
        the last step is skipped."""
        texts = [skips_of_checkpoint, cfg.skip_steps]
        parts = [part.strip() for text in texts for part in text.split(",")]
        self.text = ",".join(dict.fromkeys(filter(None, parts)))
        self.ranges = sorted(step_ranges(self.text), key=lambda r: r.start)
        longer = cfg.max_steps
        for r in self.ranges:
            longer = r.stop + 1 if longer - 1 in r else longer
        is_taken = longer == cfg.max_steps
        require(is_taken, f"skip_steps skips the last step: set --max_steps={longer}")

    def steps(self, first: int, end: int):
        """The steps from `first` to end - 1 that are not skipped, in order."""
        return (step for step in range(first, end) if not any(step in r for r in self.ranges))


class BadSteps:
    """Counts bad steps in a row: those whose loss or gradient is not finite.

    `train_step` has changed neither weights nor optimizer in such a step, on any rank.
    """

    def __init__(self, cfg: TrainConfig, checkpointer, skips: Skips, first_step: int):
        """first_step: the step that the run starts or resumes at."""
        self.checkpointer, self.skips = checkpointer, skips
        self.any_good_step = first_step > 0
        new_run_limit = min(cfg.max_bad_steps, cfg.max_steps)
        self.limit = cfg.max_bad_steps if self.any_good_step else new_run_limit
        self.max_steps = cfg.max_steps
        self.in_a_row = 0
        self.first = 0  # the first of them, counted from 1
        self.last = None  # the last of them, and its figures in words

    def count(self, done: int, loss: float, grad_norm: float, batch_hash: str) -> bool:
        """Count the step with the 1-based number `done`. Returns whether it is bad."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            self.any_good_step = True
            return False
        if self.in_a_row == 0:
            self.first = done
        self.in_a_row += 1
        self.last = done, f"loss {loss}, gradient norm {grad_norm}, batch {batch_hash}"
        return True

    def check(self) -> None:
        """Raise UserError, on all ranks alike, after too many bad steps in a row."""
        if self.in_a_row < self.limit:
            return
        self.checkpointer.finish()
        last, figures = self.last
        raise UserError(
            f"steps {self.first} to {last} had a loss or gradient that is not finite, and were "
            f"skipped (the last: {figures}). {self.checkpointer.last_good()}. {self.advice(last)}",
            on_all_ranks=True,
        )

    def advice(self, last: int) -> str:
        """What to try after bad steps up to `last`."""
        if self.any_good_step:
            all_skips = [self.skips.text, f"{self.first}:{last + 1}"]
            flags = f"--skip_steps={','.join(filter(None, all_skips))}"
            if last == self.max_steps:  # the last step cannot be skipped
                flags += f" --max_steps={last + 1}"
            return f"If other batches fail, too, lower --lr. To skip the steps above: {flags}"
        # Nothing has changed since the start, and the learning rate was never used.
        return (
            "No step was good, so it is not the batches: look at the weights that the run began "
            "with (--init_from), and at settings such as softmax_scale; or try --precision=fp32"
        )

"""The cadence of a run: which steps it takes, what follows each step, and when bad steps end it.

    Cadence    after which steps to evaluate, score tasks and save
    Skips       --skip_steps: batches that the run does not train on
    BadSteps    a step whose loss or gradient is not finite; too many in a row end the run

Steps are counted in two ways: `step` is 0 for the first one, as in the order of the data and in the
learning rate; `done` is the number of steps that are finished, so it is step + 1 after a step.
"""

import math
import re
import time

from config import TrainConfig
from program import UserError, require, shown


class Cadence:
    """What follows each step, as the settings say."""

    def __init__(self, cfg: TrainConfig, skips_of_checkpoint: str = ""):
        """skips_of_checkpoint: the --skip_steps that the checkpoint was trained with. UserError if
        the last step is skipped."""
        self.cfg = cfg
        self.skips = Skips(cfg, skips_of_checkpoint)
        self.start_save_clock()

    def steps_from(self, first: int):
        """The steps from `first` to the end of the run, in order, without the skipped ones."""
        return self.skips.steps(first, self.cfg.max_steps)

    def is_last(self, done: int) -> bool:
        """Are all steps of the run done?"""
        return done == self.cfg.max_steps

    def evaluation_due(self, done: int) -> bool:
        """Is the validation loss due? At the end of the run it always is."""
        return self.is_due(self.cfg.eval_interval or self.cfg.max_steps, done)

    def tasks_due(self, done: int) -> bool:
        """Are the zero-shot tasks due? Never if --icl_interval is 0."""
        return self.is_due(self.cfg.icl_interval, done)

    def is_due(self, interval: int, done: int) -> bool:
        """Is something due that happens every `interval` steps (0: never) and at the end?"""
        return interval > 0 and (done % interval == 0 or self.is_last(done))

    def save_due(self, done: int) -> bool:
        """Is a checkpoint due, by the number of steps?"""
        intervals = filter(None, (self.cfg.save_interval, self.cfg.keep_every))
        return self.is_last(done) or (done > 0 and any(done % every == 0 for every in intervals))

    def must_save(self, done: int, agreed, is_bad: bool) -> bool:
        """Save now? agreed: the StepConsensus after this step. is_bad: the step changed nothing.

        After a bad step the older checkpoints are worth more than a new one, unless the run ends.
        """
        is_due = self.save_due(done) or agreed.save
        run_ends = self.is_last(done) or agreed.stop_signal
        return bool(run_ends or (is_due and not is_bad))

    def must_read_now(self, done: int) -> bool:
        """Must this step's figures be read at once, since an evaluation or a save follows it?"""
        return self.evaluation_due(done) or self.tasks_due(done) or self.save_due(done)

    def start_save_clock(self) -> None:
        """Count --save_minutes from now."""
        self.saved_at = time.monotonic()

    def save_overdue(self) -> bool:
        """Have --save_minutes passed since the last save? 0 minutes: never."""
        return 0 < 60 * self.cfg.save_minutes < time.monotonic() - self.saved_at


class Skips:
    """The steps that a run skips together with their batches: --skip_steps now and in the past."""

    def __init__(self, cfg: TrainConfig, skips_of_checkpoint: str):
        texts = [skips_of_checkpoint, cfg.skip_steps]
        parts = [part.strip() for text in texts for part in text.split(",")]
        self.text = ",".join(dict.fromkeys(filter(None, parts)))
        self.ranges = disjoint(step_ranges(self.text))
        longer = cfg.max_steps
        for r in self.ranges:
            longer = r.stop + 1 if longer - 1 in r else longer
        is_taken = longer == cfg.max_steps
        require(is_taken, f"skip_steps skips the last step: set --max_steps={longer}")

    def steps(self, first: int, end: int):
        """The steps from `first` to end - 1 that are not skipped, in order."""
        return (step for step in range(first, end) if not any(step in r for r in self.ranges))

    def before(self, step: int) -> int:
        """How many of the steps 0 to step - 1 are skipped."""
        return sum(len(range(r.start, min(r.stop, step))) for r in self.ranges)


def step_ranges(text: str) -> list[range]:
    """The ranges of --skip_steps: "120:140,300:310" -> [range(119, 139), range(299, 309)].

    The text counts steps from 1, as metrics.jsonl does; the ranges count from 0. Raises UserError.
    """
    ranges = []
    for part in text.split(",") if text else []:
        ends = re.fullmatch(r"\s*(\d{1,15}):(\d{1,15})\s*", part)
        valid = ends and 0 < int(ends[1]) < int(ends[2])
        example = "ranges such as 120:140, which is 120 to 139"
        require(valid, f"skip_steps takes {example}, not {shown(part)}")
        ranges.append(range(int(ends[1]) - 1, int(ends[2]) - 1))
    return ranges


def disjoint(ranges: list[range]) -> list[range]:
    """The same steps in ranges that do not overlap, in order. Some may be empty."""
    result = []
    end = 0
    for r in sorted(ranges, key=lambda r: r.start):
        result.append(range(max(r.start, end), max(r.stop, end)))
        end = result[-1].stop
    return result


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

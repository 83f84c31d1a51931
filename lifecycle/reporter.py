"""What a run says: its description at the start, then a row of figures for each step.

    queue step n + 1 on the GPU -> the ranks agree -> read the figures of step n -> log a row

This logging lag of one step means that a GPU never waits for the host. A CPU has no queue, so there
a step is read immediately.

`agree` is how one rank's wish becomes the action of all: a signal to any rank stops all of them, at
the same step. It is an all-reduce between the CPUs, for which no GPU waits.
"""

import collections
import contextlib
import math
import time
from dataclasses import asdict, dataclass, replace

import torch

import checkpoint
import data
import devices
import flops
import optim
import parallel
import processes
import program
from config import MPTConfig, TrainConfig
from lifecycle import resume, runlog
from lifecycle.cadence import BadSteps
from model import MPT


@dataclass
class StepConsensus:
    """What the ranks have agreed on after a step. The default asks for nothing."""

    stop_signal: int = 0  # stop the run: the number of the signal that a rank received
    save: bool = False  # save now: --save_minutes have passed
    all_saved: bool = False  # no rank is still writing a checkpoint
    all_copied: bool = False  # with --remote: no rank is still copying one there


def agree(world, signals, log, cadence, checkpointer, mirror=None) -> StepConsensus:
    """Combine what each rank wants: any rank's stop or save applies to all. A collective."""
    own = [
        signals.stop_signal or log.stop_signal,
        cadence.save_overdue(),
        not checkpointer.settled(),
        not (mirror and mirror.settled()),
    ]
    stop_signal, save, writing, copying = map(int, processes.all_max(own, world))
    return StepConsensus(stop_signal, bool(save), not writing, not copying)


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


class Reporter:
    """Reads the figures of each step and logs its row."""

    def __init__(self, log, model_cfg, cfg, world, peak, cadence, checkpointer, guard, start):
        """peak: FLOP/s of all devices together, or None. start: a `resume.Start`."""
        self.log, self.model_cfg, self.cfg = log, model_cfg, cfg
        self.world, self.peak = world, peak
        self.flops_per_token, _ = flops.flops_of(model_cfg, train=cfg)
        self.cadence, self.timer = cadence, guard.straggler_timer
        self.bad_steps = BadSteps(cfg, checkpointer, cadence.skips, start.step)
        self.lag = 1 if world.device.type == "cuda" else 0  # steps queued before one is read
        self.unread = collections.deque()
        self.clock = time.perf_counter()  # when the last step that was read had ended

    @contextlib.contextmanager
    def paused(self):
        """What is done in this context is no training: it does not count as a step's time."""
        begin = time.perf_counter()
        yield
        self.clock += time.perf_counter() - begin

    def record(self, step: int, figures, agreed: StepConsensus) -> bool:
        """Take the (loss, gradient norm, batch hash) of a step that was just queued, and log the
        steps whose turn it is. A GPU's figures are read one step late, unless a save or an
        evaluation follows. A collective.

        Returns whether the last step that was read is bad. UserError after too many bad steps.
        """
        self.unread.append((step, start_reading(*figures), self.timer.take()))
        is_followed = self.cadence.must_read_now(step + 1)  # by an evaluation or a save
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
        steps_taken = step + 1 - self.cadence.skips.before(step + 1)
        tokens_per_second = tokens / step_seconds
        row = {
            "step": step + 1,
            "tokens": steps_taken * tokens,
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


# -------------------------------------------------------------------------------------------------
# The description of a run


def peak_of_all_ranks(cfg: TrainConfig, world, precision: str) -> float | None:
    """FLOP/s of all devices together; None if that of one is unknown. A collective."""
    peak = devices.peak_flops(cfg.peak_tflops, world.device, parallel.DTYPES[precision])
    # On the CPU, so over gloo: no watchdog runs yet that would notice a hanging NCCL.
    peak = processes.all_sum(torch.tensor(peak or math.nan)).item()
    return None if math.isnan(peak) else peak


def describe_run(model_cfg: MPTConfig, cfg: TrainConfig, world, precision, peak, dataset, start):
    """What is about to run, in eight lines; then what is unusual about it, and warnings."""
    n_params = flops.n_params(model_cfg)
    n_trained = trained_parameters(model_cfg, cfg)
    implementation = parallel.attention_of(model_cfg, world.device, precision)
    speed = f"{peak / 1e12:.4g} TFLOP/s peak" if peak else "peak unknown: set --peak_tflops for MFU"
    _, reason = devices.choose_precision(cfg, world.device, start.precision)
    mesh = cfg.sharding
    if cfg.tp > 1:
        mesh += f", tp {cfg.tp}{' + sequence parallel' * cfg.sequence_parallel}"
    rows_per_rank = cfg.global_batch_size // world.dp_size
    n_microbatches = math.ceil(rows_per_rank / cfg.microbatch_size)
    bubble = ""
    if cfg.pp > 1:
        from pipeline import bubble as share_of_bubble  # here, since most runs do without

        mesh += f", pp {cfg.pp}"
        bubble = f", {share_of_bubble(cfg.pp, n_microbatches):.0%} bubble"
    begins = f"starting from {cfg.init_from}" if cfg.init_from else "starting a new run"
    if start.checkpoint:
        begins = f"resuming from {start.checkpoint}"
    lines = [
        f"MPT of {n_params:,} parameters, {model_cfg.n_layers} layers x {model_cfg.d_model}, "
        f"{implementation} attention{', compiled blocks' * cfg.compile}",
        *describe_adapters(cfg, n_trained, n_params),
        f"{world.global_size} x {devices.describe(world.device)}, {mesh}, {precision} ({reason}), "
        f"{speed}",
        *describe_data(dataset, cfg),
        f"batch {cfg.global_batch_size} sequences x {model_cfg.max_seq_len} = "
        f"{world.dp_size} data-parallel ranks x {rows_per_rank} in {n_microbatches} microbatches"
        f"{bubble}",
        f"{cfg.run_dir}: {begins}",
        *rate_note(cfg, start),
        planned_time(model_cfg, cfg, world, precision, peak, start.step),
        checkpoint.space(cfg.run_dir, n_trained, cfg.keep_last),
        *parameter_warning(model_cfg),
        *team_warning(cfg, world),
        *stage_warnings(cfg, world, n_microbatches),
        next_line(model_cfg, cfg, dataset, start),
    ]
    return "\n".join(lines)


def next_line(model_cfg: MPTConfig, cfg: TrainConfig, dataset, start) -> str:
    """What comes before the first step."""
    draws = start.seed_to_draw(cfg) is not None
    words = "initializing the weights" if draws else "reading the weights"
    if start.step > 0:
        return words
    eval_tokens = cfg.eval_tokens // len(dataset.parts)
    n_windows = sum(data.n_evaluated(part.val, eval_tokens) for part in dataset.parts)
    return f"{words}, then a first evaluation of {n_windows * model_cfg.max_seq_len:,} tokens"


def planned_time(
    model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str, peak: float | None, first: int
) -> str:
    """The time of a step and of the steps from `first` on, as planning predicts it.

    Planning knows accelerators in 16 bits. For others, and for layouts that it does not know, the
    line has what one can say before the first step: see `least_time`.
    """
    device = devices.identify(world.device)
    if precision == "fp32" or device is None or not device.bf16_tflops:
        return least_time(model_cfg, cfg, world, precision, peak, first)
    from planning import answer, search  # here, since a run on a CPU does without
    from planning.fleet import Fleet

    try:
        fleet = Fleet(device, world.global_size, world.local_size)
        plan = search.evaluate(model_cfg, cfg, fleet)
        slow, fast, _ = answer.band(plan)
    except program.UserError:  # planning cannot split the model in this way
        return least_time(model_cfg, cfg, world, precision, peak, first)
    seconds = plan.seconds["step"]
    steps = cfg.max_steps - first
    left = [steps * seconds / factor for factor in (1, fast, slow)]
    expected, shortest, longest = map(runlog.duration, left)
    return (
        f"planned: {seconds:.3g} s a step, {expected} for {steps:,} steps, probably {shortest} to "
        f"{longest} (plan.py says why); the lines after step 1 say how much is left"
    )


def least_time(
    model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str, peak: float | None, first: int
) -> str:
    """The least time of a step and of the steps from `first` on: their FLOPs at the peak.

    Where no peak is known it times a matmul, for a tenth of a second. Every rank does so at the
    same time, since they may share a machine.
    """
    dtype = parallel.DTYPES[precision]
    rate = peak or world.global_size * devices.measure_peak(world.device, dtype, seconds=0.1)
    tokens = cfg.global_batch_size * model_cfg.max_seq_len  # of a step
    flops_per_token, _ = flops.flops_of(model_cfg, train=cfg)
    seconds = tokens * flops_per_token / rate
    steps = cfg.max_steps - first
    return (
        f"time: at least {seconds:.3g} s a step, {runlog.duration(steps * seconds)} for {steps:,} "
        f"steps, since a matmul reaches {rate / 1e12:.3g} TFLOP/s; the lines after step 1 say how "
        "much is left"
    )


def describe_data(dataset, cfg: TrainConfig) -> list[str]:
    """The folder, its tokens, the epochs if there are several, how rows of a chat were made.

    A line for each source of a mixture.
    """
    lines = []
    for name, share, folder, train, _ in dataset.parts:
        words = train.describe_rows() if train.has_rows else f"{train.tokens:,} training tokens"
        epochs = share * cfg.max_steps * cfg.global_batch_size / len(train)
        if epochs >= 1.05:
            words += f"; the run makes {epochs:,.{1 if epochs < 10 else 0}f} epochs"
        head = f"{name}, {share:g} of the samples, " if name else ""
        lines.append(f"{head}{folder}: {words}")
    return lines


def trained_parameters(model_cfg: MPTConfig, cfg: TrainConfig) -> int:
    """The number of parameters that a run trains, and that its checkpoints hold."""
    if not cfg.lora_rank:
        return flops.n_params(model_cfg)
    import lora  # here, since most runs do without

    return sum(param.numel() for param in lora.trained_weights(model_cfg, cfg).values())


def describe_adapters(cfg: TrainConfig, n_trained: int, n_params: int) -> list[str]:
    """A line about what a run with adapters trains, none for another run."""
    if not cfg.lora_rank:
        return []
    where = ", ".join(cfg.adapted_layers)
    if cfg.lora_last_blocks:
        where += f" of the last {cfg.lora_last_blocks} blocks"
    also = f", and {cfg.lora_train}" if cfg.lora_train else ""
    share = f"{n_trained:,} parameters are trained, {n_trained / n_params:.2%} of the model's"
    return [f"{share}: adapters of rank {cfg.lora_rank} on {where}{also}"]


# -------------------------------------------------------------------------------------------------
# Notes and warnings: none, or a line or two


def team_warning(cfg: TrainConfig, world) -> list[str]:
    """If some tensor ranks of a team are on another node than the others."""
    if world.local_size % cfg.tp == 0:
        return []
    return [
        f"WARNING: tp {cfg.tp} on nodes of {world.local_size} ranks puts a team on several nodes, "
        "where each layer waits at least four times in each microbatch for the network between "
        f"them; --tp={math.gcd(cfg.tp, world.local_size)} stays within a node"
    ]


def stage_warnings(cfg: TrainConfig, world, n_microbatches: int) -> list[str]:
    """If stages have too few microbatches; and what sharding costs them."""
    lines = []
    if n_microbatches < cfg.pp:
        from pipeline import bubble  # here, since most runs do without

        rows_per_rank = cfg.global_batch_size // world.dp_size
        fix = f"set --global_batch_size={cfg.pp * cfg.microbatch_size * world.dp_size}"
        if rows_per_rank >= cfg.pp:
            fix = f"set --microbatch_size={rows_per_rank // cfg.pp}"
        lines.append(
            f"WARNING: {n_microbatches} microbatches never fill {cfg.pp} stages: each waits for "
            f"{bubble(cfg.pp, n_microbatches):.0%} of a step; {fix}"
        )
    if cfg.pp > 1 and world.dp_size > 1 and not cfg.sharding_mode.reduces_late:
        lines.append(
            f"{cfg.sharding} gathers a stage's weights in each of its {n_microbatches} "
            "microbatches; --sharding=ZERO1 does so once a step, and needs more memory"
        )
    return lines


def rate_note(cfg: TrainConfig, start) -> list[str]:
    """If other settings than the checkpoint's make the learning rate jump."""
    if not 0 < start.step < cfg.max_steps:
        return []
    ours = asdict(cfg)
    saved = {name: start.meta.get(name, ours[name]) for name in optim.RATE_SETTINGS}
    there = replace(cfg, **saved)
    last = optim.learning_rate(start.step - 1, there)
    expected = optim.learning_rate(start.step, there)
    first = optim.learning_rate(start.step, cfg)
    if f"{first:.2e}" in (f"{last:.2e}", f"{expected:.2e}"):
        return []

    changed = ", ".join(resume.differing(optim.RATE_SETTINGS, saved, ours))
    jump = f"the learning rate goes from {last:.2e} to {first:.2e} at step {start.step + 1}"
    return [f"note: the checkpoint has {changed}: {jump}"]


def parameter_warning(model_cfg: MPTConfig) -> list[str]:
    """If the model has other parameters than flops.py and planning/memory.py count."""
    with torch.device("meta"):
        n_params = sum(param.numel() for param in MPT(model_cfg).parameters())
    planned = flops.n_params(model_cfg)
    if n_params == planned:
        return []
    return [
        f"WARNING: model.py has {n_params:,} parameters: memory, FLOPs and MFU are those of the "
        f"MPT with {planned:,}"
    ]

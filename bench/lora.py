"""A training step with adapters: beside one that trains all weights, and beside the library peft.

    python -m bench lora                                     width 768, 4 layers, vocabulary 256
    python -m bench lora --n_layers=2 --vocab_size=50368     where the logits are the most work
    python -m bench lora --precision=fp32 --lora_rank=16 --lora_targets=Wqkv

Three programs take turns, each in a process of its own: our step with adapters, on all linear
layers unless you say otherwise; our step that trains all weights; and the same adapters by peft on
transformers' MptForCausalLM. In bf16 peft's frozen matrices are bf16 as ours are, under autocast.

First all three train a few steps from the same weights on the same batch, and the losses must
agree. Then their speed is measured, and the memory of a step: what is allocated at its peak, model
and optimizer included. peft runs as its users run it, with glibc's default malloc settings.

fp32 is measured, and bf16 where this machine is faster in it; --precision chooses one. Defaults
differ from the trainer's, which --help lists: see SETTINGS, such as --lora_rank=8.
"""

import statistics

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import config
import devices
import lora
import processes
from bench import train as bench_train
from bench.beside import BesideArgs, take_turns
from bench.team import Team
from config import MPTConfig, TrainConfig, require
from model import MPT, init_weights

OURS, FULL, PEFT = "adapters", "all weights", "peft on transformers"
# A run with adapters needs a base. Here it is drawn, as the weights of a new run are.
SETTINGS = """
    --init_from=drawn --lora_rank=8 --schedule=constant --warmup_steps=0 --lr=1e-3 --compile=False
    --peak_tflops=1 --d_model=768 --n_heads=12 --n_layers=4 --global_batch_size=4
""".split()
STEPS_TO_COMPARE = 3
# The largest difference of the losses, in nats: that of rounding.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}


class Compared:
    """What is asked of each program beside its speed."""

    def losses(self) -> list[float]:
        """The loss of each of the first steps, on one batch that all programs have."""
        m = self.model_cfg
        shape = (self.cfg.global_batch_size, m.max_seq_len + 1)
        rows = torch.randint(m.vocab_size, shape, generator=torch.Generator().manual_seed(1))
        rows = rows.to(self.world.device)
        return [self.step(number, rows).item() for number in range(STEPS_TO_COMPARE)]

    def allocated(self) -> int:
        """The most bytes that are allocated in a step."""
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.turn(1)
            return torch.cuda.max_memory_allocated()
        return peak_on_cpu(lambda: self.turn(1), self.model, self.optimizer)


def peak_on_cpu(step, model, optimizer) -> int:
    """The most bytes that a step has in memory, as torch's profiler sees the CPU's allocator.

    The model and the optimizer's state, which exist before, are among them.
    """
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as record:
        step()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    state = [value for value in moments if isinstance(value, torch.Tensor)]
    current = sum(tensor.nbytes for tensor in (*model.parameters(), *state))
    peak = current
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


class OurStep(Compared, bench_train.OurProgram):
    """Our training step, with adapters or without."""


class PeftStep(Compared, bench_train.ScriptProgram):
    """peft's adapters on transformers' MPT, with the weights that ours begin with."""

    def build(self) -> None:
        """Make the model and the optimizer."""
        import peft
        from transformers import MptConfig, MptForCausalLM

        m, cfg = self.model_cfg, self.cfg
        names = ("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size")
        base = MptForCausalLM(MptConfig(**{name: getattr(m, name) for name in names}))
        settings = peft.LoraConfig(
            r=cfg.lora_rank,
            lora_alpha=cfg.lora_alpha,
            use_rslora=cfg.rslora,
            target_modules=cfg.adapted_layers,
        )
        self.model = peft.get_peft_model(base, settings)
        copy_weights(m, cfg, self.model)
        if self.precision == "bf16":
            lora.store_frozen_in_bf16(self.model)
        self.model.to(self.world.device)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained,
            lr=cfg.lr,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.adam_eps,
            weight_decay=0.0,
        )

    def loss(self, rows):
        """The mean cross-entropy of rows (B, T + 1)."""
        logits = self.model(input_ids=rows[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def copy_weights(m: MPTConfig, cfg: TrainConfig, peft_model) -> None:
    """Give peft's model the weights and the adapters that ours is drawn with."""
    ours = MPT(m)
    init_weights(ours, cfg.seed)
    lora.put_on(ours, cfg)
    lora.draw(ours, cfg.seed)
    theirs = dict(peft_model.named_parameters())
    for name, param in ours.named_parameters():
        name = name.replace("lora_A", "lora_A.default.weight")
        name = name.replace("lora_B", "lora_B.default.weight")
        layer, _, leaf = f"base_model.model.{name}".rpartition(".")
        names = (f"{layer}.{leaf}", f"{layer}.base_layer.{leaf}")  # the second beside an adapter
        (found,) = [theirs.pop(name) for name in names if name in theirs]
        found.copy_(param)
    require(not theirs, f"peft's model has weights that ours lacks: {', '.join(theirs)}")


PROGRAMS = {OURS: OurStep, FULL: OurStep, PEFT: PeftStep}


def start(name: str, same_malloc: bool, model_cfg: MPTConfig, cfg: TrainConfig):
    """The program of this name. Only ours has our malloc settings, unless all do."""
    if name == PEFT and not same_malloc:
        processes.keep_freed_memory = lambda: None
    return PROGRAMS[name](model_cfg, cfg)


def settings_of(argv: list[str], name: str, precision: str) -> tuple[MPTConfig, TrainConfig]:
    """The settings of a program: the whole batch at once, which is how peft's takes it."""
    flags = [*bench_train.SHAPE, *SETTINGS, *argv, f"--precision={precision}"]
    m, cfg, _ = config.load(flags, MPTConfig, TrainConfig, BesideArgs)
    m.check_adapters_fit(cfg)
    like_transformers = m.alibi and m.no_bias and not cfg.lora_train and not cfg.lora_last_blocks
    can_do = "transformers' MPT has ALiBi and no biases, and peft here adapts all blocks alone"
    require(like_transformers, f"{can_do}: remove the flags that change this")
    require(cfg.lora_rank, "lora_rank 0 leaves nothing to compare: remove it")
    masks = "lora_dropout draws other masks in each program, so the losses would differ: remove it"
    require(not cfg.lora_dropout, masks)
    cfg.microbatch_size = cfg.global_batch_size
    if name == FULL:
        cfg.lora_rank = 0
    return m, cfg


def precisions(argv: list[str]) -> list[str]:
    """fp32, and bf16 where it is the faster one; only --precision if that is set."""
    _, cfg, _ = config.load([*SETTINGS, *argv], MPTConfig, TrainConfig, BesideArgs)
    if cfg.precision != "auto":
        return [cfg.precision]
    device = processes.pick_device(cfg.device, 0, 1, 1)
    best, _ = devices.choose_precision(cfg, device)
    return ["fp32"] if best == "fp32" else ["fp32", "bf16"]


def require_equal(losses: dict[str, list[float]], precision: str) -> None:
    """UserError unless ours and peft's have the same losses, and all three begin with one."""
    steps = list(zip(losses[OURS], losses[PEFT], strict=True))
    pairs = [*steps, (losses[OURS][0], losses[FULL][0])]
    difference = max(abs(a - b) for a, b in pairs)
    problem = (
        f"the losses differ by {difference:.2g} nats, so these are not the same step: {losses}"
    )
    require(difference <= TOLERANCE[precision], problem)


def measure(argv: list[str], precision: str, args: BesideArgs) -> list[str]:
    """Let the programs take turns. Returns the lines of a Markdown table."""
    teams = {}
    threads = args.threads or torch.get_num_threads()
    for name in PROGRAMS:
        m, cfg = settings_of(argv, name, precision)
        teams[name] = Team(start, (name, args.same_malloc, m, cfg), 1, threads)
    try:
        losses = {name: team.call("losses")[0] for name, team in teams.items()}
        require_equal(losses, precision)
        tokens = args.steps * cfg.global_batch_size * m.max_seq_len
        rates = take_turns(teams, args, tokens)
        peaks = {name: team.call("allocated")[0] for name, team in teams.items()}
    finally:
        for team in teams.values():
            team.stop()
    return table(rates, peaks)


def table(rates: dict[str, list[float]], peaks: dict[str, int]) -> list[str]:
    """Tokens/s, and the time and memory of a step as shares of those with adapters.

    rates: tokens/s of each turn; the median counts. peaks: bytes.
    """
    lines = [
        "| program | tokens/s | its time / adapters' | GB at the peak | its memory / adapters' |"
    ]
    lines.append("|---|---|---|---|---|")
    medians = {name: statistics.median(turns) for name, turns in rates.items()}
    for name, rate in medians.items():
        time, size = medians[OURS] / rate, peaks[name] / peaks[OURS]
        lines.append(
            f"| {name} | {rate:,.0f} | {time:.2f} | {peaks[name] / 1e9:.3f} | {size:.2f} |"
        )
    share = medians[FULL] / medians[OURS]
    return [*lines, "", f"a step with adapters takes {share:.3f} of the time of one without"]


def main(argv) -> None:
    """Print a table for each precision."""
    *_, args = config.load([*SETTINGS, *argv], MPTConfig, TrainConfig, BesideArgs)
    for precision in precisions(argv):
        malloc = "the same malloc settings" if args.same_malloc else "peft with glibc's defaults"
        print(f"{precision}, {args.rounds} turns of {args.steps} steps, {malloc}\n", flush=True)
        print("\n".join(measure(argv, precision, args)), flush=True)


if __name__ == "__main__":
    config.run(main)

"""Ours beside other people's programs: training, adapters, text, evaluation.

    python -m bench beside train        transformers' MPT, and a plain GPT-2 script
    python -m bench beside lora         adapters: beside training all weights, and beside peft
    python -m bench beside generate     transformers' generate, greedily
    python -m bench beside evaluation --icl_tasks=A.jsonl,B.jsonl --icl_limit=100    lm-eval

    time / first = seconds of a program / seconds of the first in the same round, the median

Each program is a process of its own. They take turns, so that other load on the machine slows all
of them. Programs with the settings of the first do the same work, from the same random weights:
before the turns their answers (losses, token ids, sums of log-probabilities) are compared, and in
fp32 on a CPU they have to agree. `--precision` is that of training, and the dtype of the weights
for text and evaluation. Other people's programs run as their users run them, with the default
settings of glibc's malloc.

transformers and peft are in requirements-dev.txt, lm-eval is in requirements-peers.txt.
"""

import functools
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import config
import devices
import lora
import parallel
import processes
import program
from bench import train
from config import MPTConfig, TrainConfig
from evaluation import score, tasks, zero_shot
from lifecycle import runlog
from model import MPT, init_weights
from processes import Pool, PoolError
from program import require
from serving.decoder import Decoder, generate
from text import tokenizer as tokenizers

PROMPT_TOKENS = 32
NEW_TOKENS = 32
BATCH_TOKENS = 8192  # of a pass of our evaluation


@dataclass
class BesideArgs:
    """How long to measure, and how."""

    rounds: int = 5  # turns of each program; the median counts
    steps: int = 1  # optimizer steps, texts or evaluations of a turn
    threads: int = 0  # of each program (0: as many as there are cores)


class Program:
    """A program in a process of its own.

    make: a function of this Program that returns the work: a function without arguments, which
    returns its answers as a tensor.
    """

    def __init__(self, make, m: MPTConfig, cfg: TrainConfig, args: BesideArgs):
        self.m, self.cfg, self.args = m, cfg, args
        self.device = processes.pick_device(cfg.device, 0, 1, 1)
        self.precision, _ = devices.choose_precision(cfg, self.device)
        self.dtype = parallel.DTYPES[self.precision]
        torch.manual_seed(cfg.seed)
        self.work = make(self)

    def answers(self, times: int) -> list[float]:
        """The answers of doing the work so many times."""
        return [answer for _ in range(times) for answer in self.work().tolist()]

    def turn(self, steps: int) -> float:
        """Seconds in which the work is done `steps` times."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.work()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - begin

    def describe(self) -> tuple[str, str, float]:
        """The device, the precision, and the most memory so far in GB."""
        return self.device.type, self.precision, runlog.memory_gb(self.device)


# --- Models


def our_model(m: MPTConfig, seed: int) -> MPT:
    """Our model with the weights of a new run."""
    model = MPT(m)
    init_weights(model, seed)
    return model


def their_model(m: MPTConfig, seed: int) -> nn.Module:
    """transformers' MPT, which has ALiBi and no biases, with the weights of ours."""
    from transformers import MptConfig, MptForCausalLM

    names = ("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size")
    model = MptForCausalLM(MptConfig(**{name: getattr(m, name) for name in names}))
    missing = model.load_state_dict(our_model(m, seed).state_dict(), strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing  # the tied output layer
    return model


class PlainBlock(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, d_model: int, n_heads: int, bias: bool):
        super().__init__()
        self.n_heads = n_heads
        self.norm_1 = nn.LayerNorm(d_model, bias=bias)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.proj = nn.Linear(d_model, d_model, bias=bias)
        self.norm_2 = nn.LayerNorm(d_model, bias=bias)
        self.up = nn.Linear(d_model, 4 * d_model, bias=bias)
        self.down = nn.Linear(4 * d_model, d_model, bias=bias)

    def forward(self, x):
        """x (B, T, d_model) -> (B, T, d_model)."""
        B, T, d_model = x.shape
        heads = self.qkv(self.norm_1(x)).view(B, T, 3, self.n_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, d_model))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT2(nn.Module):
    """GPT-2 with tied embeddings, as a script of one page writes it."""

    def __init__(self, m: MPTConfig):
        super().__init__()
        bias = not m.no_bias
        self.wte = nn.Embedding(m.vocab_size, m.d_model)
        self.wpe = nn.Embedding(m.max_seq_len, m.d_model)
        layers = (PlainBlock(m.d_model, m.n_heads, bias) for _ in range(m.n_layers))
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(m.d_model, bias=bias)
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, ids):
        """ids (B, T) -> logits (B, T, V)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.wte(ids) + self.wpe(positions))
        return F.linear(self.norm(x), self.wte.weight)


# --- Training: the work is an optimizer step, its answer is the loss


def our_step(p: Program):
    """This project's step, with adapters or without."""
    step = train.Step(p.m, p.cfg)

    def work():
        number, rows = next(step.batches)
        return step.step(number, rows).view(1)

    return work


def script_step(p: Program, model: nn.Module, logits_of):
    """The step of a short script: PyTorch's AdamW, the whole batch at once, all its logits."""
    model.to(p.device)
    cfg = p.cfg
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, weight_decay=0.0
    )
    batches = train.random_batches(p.m, cfg.global_batch_size, p.device)

    def work():
        _, rows = next(batches)
        with parallel.autocast(p.device, p.precision):
            logits = logits_of(rows[:, :-1])  # (B, T, V)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().view(1)

    return work


def plain_step(p: Program):
    """A script around PlainGPT2."""
    model = PlainGPT2(p.m)
    return script_step(p, model, model)


def transformers_step(p: Program):
    """A script around transformers' MptForCausalLM."""
    model = their_model(p.m, p.cfg.seed)
    return script_step(p, model, lambda ids: model(input_ids=ids).logits)


def peft_step(p: Program):
    """The same with peft's adapters, which have the values of ours.

    In bf16 its frozen matrices are bf16, as ours are.
    """
    import peft

    cfg = p.cfg
    settings = peft.LoraConfig(
        r=cfg.lora_rank,
        lora_alpha=cfg.lora_alpha,
        use_rslora=cfg.rslora,
        target_modules=cfg.adapted_layers,
    )
    model = peft.get_peft_model(their_model(p.m, p.cfg.seed), settings)
    ours = our_model(p.m, p.cfg.seed)
    lora.put_on(ours, cfg)
    lora.draw(ours, cfg.seed)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, param in lora.adapters_of(ours).items():
            name = name.replace("lora_A", "lora_A.default.weight")
            name = name.replace("lora_B", "lora_B.default.weight")
            theirs[f"base_model.model.{name}"].copy_(param)
    if p.precision == "bf16":
        lora.store_frozen_in_bf16(model)
    return script_step(p, model, lambda ids: model(input_ids=ids).logits)


# --- Text: the work is to continue a batch of prompts, its answers are the new token ids


def random_prompts(p: Program) -> torch.Tensor:
    """Ids (B, PROMPT_TOKENS), the same in all programs."""
    generator = torch.Generator().manual_seed(1)
    shape = (p.cfg.global_batch_size, PROMPT_TOKENS)
    return torch.randint(p.m.vocab_size, shape, generator=generator).to(p.device)


def our_text(p: Program):
    """Our decoder with its cache."""
    decoder = Decoder(our_model(p.m, p.cfg.seed).to(p.device), p.m.vocab_size, p.dtype)
    prompts = random_prompts(p)

    def work():
        tokens = generate(decoder, prompts, NEW_TOKENS, temperature=0)
        return torch.stack([token.clone() for token in tokens], dim=1).flatten()

    return work


def their_text(p: Program):
    """transformers' generate with its cache."""
    model = their_model(p.m, p.cfg.seed).eval().to(p.device, p.dtype)
    prompts = random_prompts(p)

    def work():
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            eos_token_id=None,
            use_cache=True,
            do_sample=False,
        )
        return ids[:, PROMPT_TOKENS:].flatten()

    return work


# --- Evaluation: the work is to score all requests, its answers are sums of log-probabilities


def requests_of(p: Program) -> list:
    """The requests of the tasks, as token ids."""
    tokenizer = tokenizers.load(p.cfg.tokenizer)
    found = []
    for task in tasks.load(p.cfg.icl_tasks, limit=p.cfg.icl_limit):
        pairs = zero_shot.pairs_of(task, tokenizer, p.m.max_seq_len)
        requests, _ = zero_shot.encode(pairs, tokenizer, task.name, p.m)
        found += requests
    return found


def our_scores(p: Program):
    """evaluation/score.py."""
    world = processes.start(p.cfg.device)
    model = our_model(p.m, p.cfg.seed).eval().to(p.device, p.dtype)
    requests = requests_of(p)
    return lambda: score.score(model, requests, world, p.precision, BATCH_TOKENS)[:, 0]


def lm_eval_scores(batch: int, p: Program):
    """lm-evaluation-harness on transformers' model. batch: requests of a pass."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    # A tokenizer must be there, and is never used: the requests are token ids.
    one_word = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=one_word, eos_token="<eos>", pad_token="<eos>"
    )
    model = their_model(p.m, p.cfg.seed).eval().to(p.device, p.dtype)
    backend = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch,
        max_length=p.m.max_seq_len,
        dtype=None,
    )
    requests = [
        (None, r.ids[: -r.count].tolist(), r.ids[-r.count :].tolist()) for r in requests_of(p)
    ]

    def work():
        results = backend._loglikelihood_tokens(requests, disable_tqdm=True)
        return torch.tensor([total for total, _ in results], dtype=torch.float64)

    return work


# --- The comparisons


@dataclass(frozen=True)
class Comparison:
    """Programs that take turns.

    programs: {name: (its `make`, settings that differ from those of the command line)}.
    times: how often the work is done for the answers that are compared.
    tolerance: their largest difference in fp32 on a CPU.
    """

    settings: str
    programs: dict
    times: int
    tolerance: float


STEP = "--compile=False --peak_tflops=1"
COMPARISONS = {
    "train": Comparison(
        settings=STEP,
        programs={
            "ours, ALiBi": (our_step, {"alibi": True}),
            "ours, learned positions": (our_step, {"alibi": False}),
            "transformers": (transformers_step, {"alibi": True}),
            "plain GPT-2": (plain_step, {"alibi": False}),
        },
        times=1,
        tolerance=1e-4,
    ),
    "lora": Comparison(
        # A run with adapters needs a base. Here it is drawn, as the weights of a new run are.
        settings=f"{STEP} --init_from=drawn --lora_rank=8 --schedule=constant --warmup_steps=0"
        " --lr=1e-3 --d_model=768 --n_heads=12 --n_layers=4 --global_batch_size=4",
        programs={
            "adapters": (our_step, {}),
            "all weights": (our_step, {"lora_rank": 0}),
            "peft on transformers": (peft_step, {}),
        },
        times=3,
        tolerance=1e-4,
    ),
    "generate": Comparison(
        settings="--d_model=768 --n_heads=12 --n_layers=12 --vocab_size=50368 --max_seq_len=2048"
        " --global_batch_size=1",
        programs={"ours": (our_text, {}), "transformers": (their_text, {})},
        times=1,
        tolerance=0,
    ),
    "evaluation": Comparison(
        settings="--d_model=256 --n_heads=4 --n_layers=4 --vocab_size=50368 --max_seq_len=1024",
        programs={"ours": (our_scores, {})}
        | {f"lm-eval, batch {n}": (functools.partial(lm_eval_scores, n), {}) for n in (1, 8, 32)},
        times=1,
        tolerance=1e-2,
    ),
}


def start(comparison: Comparison, argv: list[str]) -> dict[str, Pool]:
    """{program: its process}."""
    pools = {}
    words = [*train.SHAPE, *comparison.settings.split(), *argv]
    for name, (make, changes) in comparison.programs.items():
        m, cfg, args = config.load(words, MPTConfig, TrainConfig, BesideArgs)
        cfg.microbatch_size = cfg.global_batch_size  # the whole batch at once, as the others do
        for key, value in changes.items():
            setattr(m if hasattr(m, key) else cfg, key, value)
        threads = args.threads or torch.get_num_threads()
        pools[name] = Pool(1, Program, make, m, cfg, args, threads=threads)
    return pools


def ask(pools: dict[str, Pool], method, *args) -> dict[str, object]:
    """{program: its answer}. One that fails is dropped, from `pools`, too, and a line says why.

    UserError if all of them fail.
    """
    answers = {}
    for name, pool in list(pools.items()):
        try:
            (answers[name],) = pool(method, *args)
        except PoolError as error:
            files = "-r requirements-dev.txt, or -r requirements-peers.txt for lm-eval"
            fix = f": pip install {files}" if "No module named" in str(error) else ""
            print(f"{name}: n/a, {error}{fix}", file=sys.stderr, flush=True)
            del pools[name]
    require(pools, "none of the programs could be measured")
    return answers


def take_turns(pools: dict[str, Pool], rounds: int, steps: int) -> dict[str, list[float]]:
    """{program: seconds of its turns}, of those that took them all."""
    ask(pools, Program.turn, steps)  # warms up
    turns = [ask(pools, Program.turn, steps) for _ in range(rounds)]
    return {name: [seconds[name] for seconds in turns] for name in pools}


def compare_answers(comparison: Comparison, pools: dict[str, Pool]) -> dict[str, float]:
    """{program: its largest difference from the first one}, of those with the same settings.

    UserError if they should agree and do not.
    """
    answers = ask(pools, Program.answers, comparison.times)
    places = ask(pools, Program.describe)
    first, *_ = pools
    differences = {}
    for name, (_, changes) in comparison.programs.items():
        if name in pools and changes == comparison.programs[first][1]:
            pairs = zip(answers[name], answers[first], strict=True)
            differences[name] = max(abs(a - b) for a, b in pairs)

    device, precision, _ = places[first]
    worst = max(differences.values())
    agree = worst <= comparison.tolerance or (device, precision) != ("cpu", "fp32")
    require(agree, f"the answers differ, so this is not the same work: {differences}")
    return differences


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """{program: its time over that of the first in the same round, the median}."""
    first = next(iter(seconds.values()))
    return {
        name: statistics.median(mine / base for mine, base in zip(turns, first, strict=True))
        for name, turns in seconds.items()
    }


def main(argv: list[str]) -> None:
    """Let the programs of a comparison take turns, and print their times and ratios."""
    if program.wants_help(argv):
        program.show_help(program.settings_help(MPTConfig, TrainConfig, BesideArgs))
    name, *flags = argv or [""]
    usage = f"python -m bench beside {'|'.join(COMPARISONS)} [--key=value]"
    require(name in COMPARISONS, f"usage: {usage}")
    comparison = COMPARISONS[name]
    words = [*comparison.settings.split(), *flags]
    _, cfg, args = config.load(words, MPTConfig, TrainConfig, BesideArgs)
    require(cfg.icl_tasks or name != "evaluation", "set --icl_tasks=A.jsonl,B.jsonl")

    pools = start(comparison, flags)
    try:
        differences = compare_answers(comparison, pools)
        seconds = take_turns(pools, args.rounds, args.steps)
        places = ask(pools, Program.describe)
    finally:
        for pool in pools.values():
            pool.stop()
    print(f"{args.rounds} turns of {args.steps}\n")
    print(table(seconds, places, differences))


def table(seconds: dict, places: dict, differences: dict) -> str:
    """A line for each program, see `take_turns`, `Program.describe` and `compare_answers`."""
    lines = []
    for name, ratio in ratios(seconds).items():
        _, precision, memory_gb = places[name]
        typical = f"{statistics.median(seconds[name]):.3f}"
        differs = f"{differences[name]:.1e}" if name in differences else "n/a"
        lines.append((name, precision, typical, f"{ratio:.2f}", f"{memory_gb:.2f}", differs))
    heads = ("program", "precision", "s a turn", "time / first", "peak GB", "answers differ by")
    return program.table(heads, lines)


if __name__ == "__main__":
    program.run(main)

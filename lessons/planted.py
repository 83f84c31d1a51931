"""A small training loop into which a bug can be planted: the curves of lesson 2.

Lesson 2 trains without a bug and with each of five, and asks which is which. So the table of what
can be measured names the runs A to E.

The model is an MPT with two layers on the bytes of Python's standard library. A step has four
microbatches of very unequal size: one of code, three of a few import lines each.

    code       8 rows of 64 bytes                      504 tokens that count
    imports    2 rows of one line such as `import os`  about 50; what fills a row up does not count

What is logged is what the loop believes, bug included: its loss, its gradient norm. The validation
is separate code without a bug, on rows that no run is trained on.
"""

import hashlib
from pathlib import Path

import torch

import data
import model as mpt
import optim
import parallel
import program
from config import MPTConfig, TrainConfig
from loss import IGNORE
from text import sources

STEPS = 120
LR = 6e-3
CODE_ROW = 64  # bytes of a row of code; all but the first are predicted
IMPORT_ROW = 32  # bytes of a row with an import line, at most
FILLER = 0  # a byte that no source file has
DECAY = 0.1

CAUSES = {
    "gradients not zeroed": "the gradients of all steps so far add up",
    "mean of means": "the loss is the mean of the microbatches' means, however long they are",
    "schedule too fast": "the schedule's step is increased at each microbatch, not at each update",
    "decay without rate": "the weight decay, 0.1, is not multiplied by the learning rate",
    "labels not shifted": "each label is the token itself, not the one that follows",
}
SIZES = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 256, "max_seq_len": CODE_ROW}
MODEL = MPTConfig(**SIZES, alibi=True, no_bias=True)


class Run:
    """What was logged of a run, and its validation at the end. Losses are in nats per token."""

    def __init__(self):
        self.loss = []  # of each step, as the loop computes it
        self.grad_norm = []  # of each step, before clipping
        self.update = []  # root mean square of the weights' change
        self.weight = []  # root mean square of the weights, after it
        self.moved = []  # share of the weights that changed at all
        self.code = self.imports = 0.0  # validation losses on code and on import lines


def letters() -> dict[str, str]:
    """{letter: cause}. The order is that of a hash, so that it is not seen at a glance."""
    shuffled = sorted(CAUSES, key=lambda cause: hashlib.sha256(cause.encode()).digest())
    return dict(zip("ABCDE", shuffled, strict=True))


class Text:
    """Rows of code and of import lines, from every sixth file of the standard library.

    code, imports             to train on: (n, CODE_ROW) and (m, IMPORT_ROW) bytes, int64
    held_code, held_imports   every eighth row, kept for validation
    """

    def __init__(self):
        texts = [Path(path).read_bytes() for path in sources.stdlib_files()[::6]]
        lines = [line for text in texts for line in text.splitlines(keepends=True)]
        short = [line for line in lines if line.startswith((b"import ", b"from "))]
        code = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).long()
        code = code[: len(code) // CODE_ROW * CODE_ROW].view(-1, CODE_ROW)
        rows = [list(line.ljust(IMPORT_ROW, b"\0")[:IMPORT_ROW]) for line in sorted(set(short))]
        self.code, self.held_code = split(code)
        self.imports, self.held_imports = split(torch.tensor(rows))

    def batch(self, generator):
        """The microbatches [(ids, labels), ...] of a step: one of code, three of imports."""
        kinds = [(self.code, 8)] + [(self.imports, 2)] * 3
        picks = [rows[torch.randint(len(rows), (n,), generator=generator)] for rows, n in kinds]
        return [ids_and_labels(rows) for rows in picks]


def split(rows):
    """(The rows to train on, every eighth row)."""
    held = torch.arange(len(rows)) % 8 == 0
    return rows[~held], rows[held]


def ids_and_labels(rows):
    """rows (n, T) of bytes -> ids and labels (n, T - 1); what fills a row up does not count."""
    ids, labels = data.inputs_and_labels(rows)
    return ids, labels.masked_fill(labels == FILLER, IGNORE)


def train(
    text: Text, cause: str = "", steps: int = STEPS, lr: float = LR, dtype=torch.float32
) -> Run:
    """Train with one of CAUSES planted, or without a bug. lr: the peak learning rate.

    After each step, the weights are rounded to `dtype`. All computing is in fp32.
    """
    cfg = TrainConfig(lr=lr, max_steps=steps, warmup_steps=steps // 8, alpha_f=0.0)
    model = mpt.MPT(MODEL)
    mpt.init_weights(model, seed=0)
    round_to(dtype, model)
    betas = (cfg.beta1, cfg.beta2)
    optimizer = torch.optim.AdamW(model.parameters(), cfg.lr, betas, weight_decay=0, fused=True)
    generator = torch.Generator().manual_seed(0)
    run = Run()
    calls_of_the_schedule = 0
    for step in range(steps):
        microbatches = text.batch(generator)
        if cause != "gradients not zeroed":
            optimizer.zero_grad()
        run.loss.append(forward_backward(model, microbatches, cause))

        norm = parallel.grad_norm(model)
        optim.clip_gradients(model.parameters(), norm, cfg.grad_clip)
        rate = optim.learning_rate(step, cfg)
        if cause == "schedule too fast":
            rate = optim.learning_rate(calls_of_the_schedule, cfg)
        calls_of_the_schedule += len(microbatches)
        decay = DECAY if cause == "decay without rate" else rate * DECAY
        update(model, optimizer, rate, decay, dtype, run)
        run.grad_norm.append(norm.item())
    run.code, run.imports = validation(model, text)
    return run


def forward_backward(model, microbatches, cause: str) -> float:
    """Add the gradients of all microbatches to .grad. Returns the loss, as the loop believes it."""
    n_tokens = sum((labels != IGNORE).sum() for _, labels in microbatches)
    logged = 0.0
    for ids, labels in microbatches:
        if cause == "labels not shifted":
            labels = ids.masked_fill(labels == IGNORE, IGNORE)
        share = 1 / n_tokens
        if cause == "mean of means":
            share = 1 / (labels != IGNORE).sum() / len(microbatches)
        loss = model(ids, labels=labels) * share
        loss.backward()
        logged += loss.item()
    return logged


@torch.no_grad()
def update(model, optimizer, rate: float, decay: float, dtype, run: Run) -> None:
    """One step of AdamW: weights *= 1 - decay, then Adam with this learning rate."""
    before = torch.nn.utils.parameters_to_vector(model.parameters())
    for parameter in model.parameters():
        parameter.mul_(1 - decay)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    round_to(dtype, model)
    after = torch.nn.utils.parameters_to_vector(model.parameters())
    run.update.append((after - before).square().mean().sqrt().item())
    run.weight.append(after.square().mean().sqrt().item())
    run.moved.append((after != before).float().mean().item())


@torch.no_grad()
def round_to(dtype, model) -> None:
    """Round each weight to the nearest number of this dtype."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


@torch.no_grad()
def validation(model, text: Text) -> tuple[float, float]:
    """The loss on held-out code and import lines, in nats per token, with labels that are right."""
    some_code = text.held_code[:: len(text.held_code) // 128]
    losses = []
    for rows in (some_code, text.held_imports):
        ids, labels = ids_and_labels(rows)
        losses.append((model(ids, labels=labels) / (labels != IGNORE).sum()).item())
    return losses[0], losses[1]


HEADS = (
    "run", "logged loss", "code", "imports", "grad norm: first", "last",
    "update: 10 %", "50 %", "90 %", "weights: first", "last",
)  # fmt: skip


def table(runs: dict[str, Run]) -> str:
    """What is measured of each run: {name: run}."""
    rows = []
    for name, run in runs.items():
        last = len(run.loss) // 10  # steps, a tenth of the run
        mean_loss = sum(run.loss[-last:]) / last
        losses = [f"{loss:.2f}" for loss in (mean_loss, run.code, run.imports)]
        norms = [f"{norm:.1f}" for norm in (run.grad_norm[0], run.grad_norm[-1])]
        steps = (len(run.loss) * tenth // 10 for tenth in (1, 5, 9))
        updates = [f"{1000 * run.update[step]:.2f}" for step in steps]
        weights = [f"{size:.3f}" for size in (run.weight[0], run.weight[-1])]
        rows.append((name, *losses, *norms, *updates, *weights))
    return program.table(HEADS, rows)


LEGEND = """\
Losses in nats per token; code and imports: the validation. Size of the weights and their change
in a step: root mean squares, the change in thousandths, at 10 %, 50 %, 90 % of the steps.
"""

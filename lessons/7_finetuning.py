"""Lesson 7. Finetuning."""

# %% [markdown]
# # Lesson 7. Finetuning
#
# A trained model can learn a new task from a small update of its weights. LoRA writes that
# update as a product of two thin matrices, and trains nothing else. You will take it apart,
# let a small model learn an answer format in two minutes, and see what that cost it.
#
# An hour. The textbook is lora.py; weights/peft.py has the files. Section 5 is best after
# `make train`, since it starts from its model; without it the lesson trains a shorter one.

# %%
import sys

sys.path += [".", ".."]  # the project: an editor may start cells in the file's folder
SHORT = "--short" in sys.argv  # fewer and smaller runs, for a first look and for the tests

import json
import math
import os
import shutil
import subprocess
import textwrap
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import checkpoint
import config
import fsdp_train
import lora
import processes
import program
from config import MPTConfig, TrainConfig
from lessons import finetuned, pictures, questions, spectrum
from lifecycle import runlog
from model import MPT, init_weights
from program import UserError
from storage import checkpoint_files
from text import tokenizer as tokenizers
from weights import load, peft

os.chdir(pictures.ROOT)  # paths such as runs/demo count from here
torch.manual_seed(0)
CPU = torch.device("cpu")

# %% [markdown]
# ## 1. W + s B A
#
# A linear layer computes y = W x + b, with W (out, in). Finetuning changes W by an update D
# of the same shape. LoRA allows only updates of a low rank r, and writes them as a product:
#
#   D = s B A        A (r, in)    B (out, r)    s = alpha / r, a constant
#   y = W x + b + s B (A x)
#
# W and b are frozen. A and B are trained. `lora.adapt` gives a layer its A and B. In code,
# s is called `scale`.

# %%
layer = nn.Linear(48, 64)
lora.adapt(layer, TrainConfig(lora_rank=4, lora_alpha=8.0))
nn.init.normal_(layer.lora_A, std=0.1)
nn.init.normal_(layer.lora_B, std=0.1)

x = torch.randn(10, 48)  # ten rows
s = 8.0 / 4
low = x @ layer.lora_A.T  # (10, 4): A x
y = x @ layer.weight.T + layer.bias + s * low @ layer.lora_B.T
difference = (y - layer(x)).abs().max().item()
print(f"by hand and lora.py::LoRALinear: at most {difference:.1e} apart, of {y.abs().max():.2f}")
assert difference < 1e-5

# %% [markdown]
# The product is computed from the right: A x first, with r numbers a row. B A would be as
# large as W. How much smaller are A and B? These are the linear layers of a block of
# MPT-7B, at rank 8.

# %%
mpt7b, adapters7b = config.load(["configs/lora_mpt7b.py"], MPTConfig, TrainConfig)
r = adapters7b.lora_rank
cells = []
for name, (n_out, n_in) in mpt7b.linear_layers().items():
    whole, thin = n_out * n_in, r * (n_out + n_in)
    cells.append((name, f"{whole:,}", f"{thin:,}", f"{thin / whole:.2%}"))
print(program.table(("layer", "W: out x in", "A and B: r (out + in)", "share"), cells))

# %% [markdown]
# That saves memory where each trained number is expensive: its gradient, Adam's two means,
# and the checkpoint. It also saves computing. A step costs 6 FLOPs for each weight and
# token: 2 in the forward pass, 2 for the gradient of x and 2 for the gradient of W. A
# frozen W needs 4. Autograd computes the gradients of A, B, and x (for the layers below):

# %%
layer.weight.requires_grad_(False)
layer.bias.requires_grad_(False)  # lora.put_on does this for a whole model
layer(x).square().sum().backward()
for name, param in layer.named_parameters():
    has_one = "no" if param.grad is None else "yes"
    print(f"{name:8} {str(tuple(param.shape)):10} gradient: {has_one}")
assert layer.weight.grad is None and layer.lora_A.grad is not None

# %% [markdown]
# ## 2. Why B starts at zero
#
# The gradients of the two factors, for G = the gradient of the loss with respect to W:
#
#   dA = s B^T G        dB = s G A^T
#
# If both start at zero, both gradients are zero for ever. If both start random, the model
# is damaged before the first step, by an update that nobody has learned. With A random and
# B zero the first step starts from the model itself, and the gradient of B is not zero.
#
# To try all three, take a layer that needs a known update D, with the singular values 1,
# 1/2, 1/3, ... and inputs x from a normal distribution. Then the mean squared error of the
# output is
#
#   mean |D x - s B A x|^2 = |D - s B A|^2        the sum of the squared elements
#
# The table has its root relative to |D|: 1 = no update. Section 3: no rank 4 can do better
# than 0.352.

# %%
OUT, IN = 64, 48
steps = 150 if SHORT else 600
U, _ = torch.linalg.qr(torch.randn(OUT, IN))
V, _ = torch.linalg.qr(torch.randn(IN, IN))
D = U @ torch.diag(1 / torch.arange(1.0, IN + 1)) @ V.T  # (out, in)


def fit(target, a, b, steps):
    """Train A and B towards target = B A (s = 1). Returns the relative error before each step."""
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    optimizer = torch.optim.Adam([a, b], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    errors = []
    for _ in range(steps):
        loss = (target - b @ a).square().sum()
        errors.append((loss.sqrt() / target.norm()).item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return errors


def random_a(rank):
    """A as lora.draw makes it: uniform within +-1 / sqrt(in)."""
    return (2 * torch.rand(rank, IN) - 1) / math.sqrt(IN)


starts = {
    "A random, B zero": (random_a(4), torch.zeros(OUT, 4)),
    "both zero": (torch.zeros(4, IN), torch.zeros(OUT, 4)),
    "both random": (random_a(4), torch.randn(OUT, 4)),
}
cells, ends = [], {}
for name, (a, b) in starts.items():
    errors = fit(D, a, b, steps)
    ends[name] = errors[-1]
    cells.append((name, f"{errors[0]:.3f}", f"{errors[-1]:.3f}"))
    assert (abs(errors[0] - 1) < 1e-6) == (name != "both random")
print(program.table(("rank 4", "error before step 1", f"after {steps} steps"), cells))
assert abs(ends["both zero"] - 1) < 1e-6 and ends["A random, B zero"] < 0.7

# %% [markdown]
# So with A random and B zero a whole model starts as exactly the model that it was. Bit by
# bit:

# %%
SMALL = MPTConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=256, max_seq_len=32, alibi=True)
model = MPT(SMALL).eval()
init_weights(model, seed=0)
ids = torch.randint(256, (2, 32))
with torch.no_grad():
    base_logits = model(ids)
    lora.put_on(model, TrainConfig(lora_rank=4))
    lora.draw(model, seed=0)
    assert torch.equal(model(ids), base_logits)
trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
print(f"adapters put on: {trained:,} numbers to train, and the same logits, bit by bit")

# %% [markdown]
# ## 3. What the rank does
#
# Every update is a sum of terms of rank 1 (its singular value decomposition):
#
#   D = sum of sigma_i u_i v_i^T        sigma_1 >= sigma_2 >= ...
#
# A term reads one direction v_i of the input and writes one direction u_i of the output.
# The nearest matrix of rank r keeps the r largest terms (Eckart and Young, 1936), and
# misses
#
#   |D - D_r| / |D| = sqrt(sum over i > r of sigma_i^2) / sqrt(sum over all i of sigma_i^2)
#
# `lora.factors` computes it. The columns below: this formula; what training A and B
# reaches, which does not know the decomposition; and the best for an update without a
# pattern, whose singular values are nearly equal.

# %%
sigma = torch.linalg.svdvals(D)
patternless = torch.randn(OUT, IN)
cells = []
for rank in (1, 2, 4, 8, 16):
    A, B = lora.factors(D, rank)
    best = ((D - B @ A).norm() / D.norm()).item()
    formula = (sigma[rank:].norm() / sigma.norm()).item()
    assert abs(best - formula) < 1e-5
    reached = fit(D, random_a(rank), torch.zeros(OUT, rank), steps)[-1]
    assert reached > best - 1e-4
    assert reached < best * (1.3 if SHORT else 1.05)
    A, B = lora.factors(patternless, rank)
    no_pattern = ((patternless - B @ A).norm() / patternless.norm()).item()
    shares = [f"{x:.1%}" for x in (best, reached, no_pattern)]
    cells.append((rank, f"{rank * (OUT + IN):,}", *shares))
print(program.table(("rank", "r (out + in)", "best", "trained", "best, no pattern"), cells))
print(f"all of D has {OUT * IN:,} numbers")

# %% [markdown]
# Low rank is a bet that the update has a pattern: that a few directions matter. Section 6
# measures it on a trained update.
#
# ## 4. Merging
#
# After training, W' = W + s B A is a weight like any other. `lora.merge` puts it there, and
# a plain model is left, which costs nothing more to run.

# %%
for param in lora.adapters_of(model).values():
    nn.init.normal_(param, std=0.1)
with torch.no_grad():
    beside = model(ids)
    error = lora.merge(model)
    merged = model(ids)
difference = (merged - beside).abs().max().item()
print(f"the update changes the logits by up to {(merged - base_logits).abs().max():.2f}")
print(f"merged, and beside the base: the logits are at most {difference:.1e} apart")
print(f"rounding of a weight: {error:.1e} at most")
assert difference < 1e-4 and error == 0.0

# %% [markdown]
# Nothing was lost, since W is fp32 as A and B are; the logits differ because the additions
# come in another order. A bf16 has 8 significant bits: near 0.02, a usual size of a weight,
# its neighbours are 0.0001 apart, and a change of less than half of that is lost. This is
# what merging and unmerging does to a bf16 W with elements of about 0.02:

# %%
W = (0.02 * torch.randn(512, 512)).bfloat16()
cells, changed = [], {}
for size in (1e-2, 1e-3, 1e-4, 1e-5):
    update = size * torch.randn(512, 512)
    stored = (W.float() + update).bfloat16()
    back = (stored.float() - update).bfloat16()
    changed[size] = (stored != W).float().mean().item()
    cells.append((f"{size:.0e}", f"{changed[size]:.1%}", f"{(back == W).float().mean():.1%}"))
heads = ("size of s B A", "elements of W that change", "W' - s B A: that come back")
print(program.table(heads, cells))
assert changed[1e-2] > 0.9 and changed[1e-5] < 0.5

# %% [markdown]
# In the last rows W comes back because most of the update never went in.
#
# Two rules follow. Merge in fp32, and round once. Keep the base, since subtracting s B A
# from a merged weight gives W only to within rounding. lessons/finetuning.md says which
# weights are used when, and what to keep.
#
# ## 5. A real run in miniature
#
# A small model has read Python's standard library. It is to learn to answer this:
#
#   prompt      def get_paths(scheme, vars=None, expand=True):
#   response      # 3 arguments
#
# lessons/questions.py makes such questions from the library, and holds some out: no run
# learns from those. With --short they are made up, and the model is too small to learn
# anything.

# %%
PLACE = "runs/lessons/7-short" if SHORT else "runs/lessons/7"
ASKED = 16 if SHORT else 128  # questions
STEPS = 20 if SHORT else 300  # of finetuning
BASE_STEPS = 20 if SHORT else 300  # of the base, if there is no demo

QUESTIONS = Path(f"{PLACE}-questions")
words = "area size read load find join open next".split()
listed = ["", "x", "x, y", "x, y, z"]
made_up = {f"def {a}_{b}({x}):": n for a in words for b in words for n, x in enumerate(listed)}
questions.write(QUESTIONS, made_up if SHORT else questions.headers())
asked = finetuned.read_questions(str(QUESTIONS / "held_out.jsonl"))[:ASKED]
for row in asked[:3]:
    print(f"{row['prompt']:62}{row['response']}")

# %% [markdown]
# Now the runs: `fsdp_train.py`, as anybody would start it. The base is runs/demo, if `make
# train` has made it. If not, a shorter one is trained now, in a minute or two. A run that
# is there already is used again.

# %%
TINY = "--d_model=64 --n_heads=2 --n_layers=2 --vocab_size=257 --tokenizer=bytes --warmup_steps=2"


def train(recipe: str, run_dir: str, steps: int, *flags) -> None:
    """Train anew, in a process of its own. Print a few rows of its metrics at the end."""
    shutil.rmtree(run_dir, ignore_errors=True)
    length = [f"--run_dir={run_dir}", f"--max_steps={steps}", f"--save_interval={steps}"]
    fixed = ["--eval_interval=0", "--eval_tokens=16384", "--device=cpu"]
    tiny = TINY.split() if SHORT else []
    command = ["fsdp_train.py", recipe, *length, *flags, *fixed, *tiny]
    shown = textwrap.wrap(
        f"$ python {program.shell(*command)}", 86, break_long_words=False, break_on_hyphens=False
    )
    print(" \\\n    ".join(shown), flush=True)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    for row in runlog.read(run_dir):
        if "val_loss" in row or row["step"] % (steps // 5) == 0:
            print(" ", runlog.line(row, steps).partition("  lr")[0])


def is_finished(run_dir: str, steps: int) -> bool:
    """Whether a run is there, with its base."""
    newest = checkpoint.latest(run_dir)
    if newest is None or newest.name != f"step-{steps}":
        return False
    try:
        load.base_at(newest)
    except UserError:  # the base was trained anew since
        return False
    return True


demo = checkpoint.latest("runs/demo")
BASE = "runs/demo" if demo and demo.name == "step-700" and not SHORT else f"{PLACE}-base"
if checkpoint.latest(BASE) is None:
    text = ["--dataset=*.py", f"--data_dir={PLACE}-text"] if SHORT else []
    train("configs/demo.py", BASE, BASE_STEPS, "--peak_tflops=auto", *text)
print(f"the base: {checkpoint.latest(BASE)}")

# %% [markdown]
# Then the adapters, by configs/lora_demo.py: rank 8 on all linear layers, 3 % of the
# model's numbers. Read its few lines now. The loss is over the tokens of the responses
# alone. Each has one token more than its text, the end-of-text: with bytes, 15 bytes have
# 16 tokens. So bits per byte is not nats per token / ln 2 there.

# %%
LORA = f"{PLACE}-lora-on-demo" if BASE == "runs/demo" else f"{PLACE}-lora"
if not is_finished(LORA, STEPS):
    data_flags = [f"--dataset={QUESTIONS}/train.jsonl", f"--data_dir={LORA}-tokens"]
    shutil.rmtree(f"{LORA}-tokens", ignore_errors=True)  # of another base, perhaps
    train("configs/lora_demo.py", LORA, STEPS, f"--init_from={BASE}", *data_flags)
found = checkpoint.find(LORA)
losses = [row["loss"] for row in runlog.read(LORA) if "loss" in row]
print(f"{found}: loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
assert losses[-1] < losses[0]

# %% [markdown]
# What did it bring, and what did it cost? An answer counts if it is right in every
# character and ends there (lessons/finetuned.py). The cost is measured on the base's own
# validation text.
#
# `measure(k)` keeps the k largest terms of each layer's update: 0 is the base, r is all of
# it.

# %%
settings = checkpoint_files.read_adapter_settings(found)
tokenizer = tokenizers.load(checkpoint.read_meta(found)["tokenizer"], load.tokenizer_file(found))
world = processes.World(0, 1, 0, 1, CPU)


def measure(kept: int):
    """(share of exact answers, loss in nats per token on the base's text, answers)."""
    model = load.load_adapted(found, CPU)
    spectrum.keep(model, kept)
    lora.merge(model)
    val, text_settings = finetuned.text_of(BASE, model.cfg.max_seq_len)
    text_settings = replace(text_settings, eval_tokens=2_048 if SHORT else 16_384)
    loss = fsdp_train.evaluate(model, val, text_settings, world, "fp32")
    answers = finetuned.answers_of(model, tokenizer, asked)  # last: it repacks the weights
    return sum(map(finetuned.is_exact, answers, asked)) / len(asked), loss, answers


terms = [0, settings.lora_rank] if SHORT else [0, 1, 2, 4, settings.lora_rank]
results = {kept: measure(kept) for kept in terms}
for kept, words in ((0, "before"), (settings.lora_rank, "after")):
    exact, loss, answers = results[kept]
    print(f"{words}: {exact:.1%} of {len(asked)} exact, loss on the base's text {loss:.3f}")
    for row, answer in list(zip(asked, answers, strict=True))[:3]:
        print(f"    {row['prompt']:50.50} {answer.text.strip()!r:.30}")

# %% [markdown]
# The loss on the base's text has grown. This is *catastrophic forgetting*: nothing in the
# questions asks for ordinary code, so the update is free to damage it.
#
# With the demo as base and all 401 held-out questions, this project measured (one run each,
# two cores of a CPU, seed 1337, Python 3.11):
#
#                                   exact answers   loss on the base's text
#   the demo                                0.0 %                     4.729
#   after 300 steps in bf16                97.8 %                     5.565
#   in fp32, on another CPU                94.8 %                     5.931
#
# But the base is still there. Without the adapters it is the model that it was, bit by bit:

# %%
bare = load.load_adapted(found, CPU)
spectrum.keep(bare, 0)
lora.merge(bare)
original = load.load_model(checkpoint.find(BASE), CPU).state_dict()
assert all(torch.equal(value, original[name]) for name, value in bare.state_dict().items())
print(f"adapters removed: {len(original)} tensors, all equal to those of {BASE}")

# %% [markdown]
# ## 6. The spectrum of the update
#
# Was the bet of section 3 right? These are the singular values of the trained updates, by
# lessons/spectrum.py, and the size of each update relative to its weight.

# %%
layers = spectrum.adapted_layers(load.load_adapted(found, CPU))
spectrum.print_spectra(layers)
spectra = {name: spectrum.singular_values(layer) for name, layer in layers.items()}
falls = torch.stack([values[-1] / values[0] for values in spectra.values()]).median().item()
print(f"the last of {settings.lora_rank} is {falls:.0%} of the first (median over the layers)")

# %% [markdown]
# How much of each update do the largest k terms hold, and how much of the new task?

# %%
cells = []
for kept, (exact, loss, _) in results.items():
    missing = [(values[kept:].norm() / values.norm()).item() for values in spectra.values()]
    cells.append((kept, f"{sum(missing) / len(missing):.1%}", f"{exact:.1%}", f"{loss:.3f}"))
heads = ("terms", "of the update missing", "exact answers", "loss on the base's text")
print(program.table(heads, cells))

exact, loss, _ = results[settings.lora_rank]
base_exact, base_loss, _ = results[0]
if not SHORT:
    assert base_exact < 0.05 and exact > 0.4, "the answer format was not learned"
    assert loss > base_loss + 0.1, "nothing was forgotten?"
    assert falls < 0.5

# %%
figure = Figure(figsize=(5, 4), layout="constrained")
axes = figure.subplots()
looks = {"Wqkv": "o-", "out_proj": "s--", "up_proj": "^-.", "down_proj": "v:"}
for name, values in spectra.items():
    block, kind = int(name.split(".")[1]), name.rpartition(".")[2]
    label = kind if block == 0 else None
    numbers = range(1, len(values) + 1)
    grey = str(min(0.75, block / 4))
    axes.semilogy(numbers, values, looks[kind], color=grey, markersize=4, label=label)
axes.legend(fontsize="small", frameon=False)
axes.set(xlabel="number of the singular value", ylabel="singular value of s B A")
axes.set(title="The updates of all layers (light: later blocks)")
axes.grid(alpha=0.3)
pictures.save(figure, "7-short-spectrum" if SHORT else "7-spectrum")

# %% [markdown]
# In the project's own run on the demo the values fall to a tenth and less. There the
# largest term of every layer gives more than half of the right answers, two give three
# quarters, and all of them take seven or eight. One run of this lesson without the demo, on
# its base of 300 steps, gave 3 % with one term, 52 % with two and 93 % with four.
# `python -m lessons.spectrum RUN` prints this for any run with adapters.
#
# ## 7. Other people's files
#
# Most adapters are trained with PEFT, a library of Hugging Face. Its folder has two files:
#
#   adapter_config.json           r, lora_alpha, use_rslora, ...
#   adapter_model.safetensors     A and B of each layer
#
# weights/peft.py writes and reads them. A safetensors file is 8 bytes with the length n of
# its header, n bytes of JSON, and then raw numbers. No code runs when it is read.

# %%
FOREIGN = Path(f"{PLACE}-peft")
shutil.rmtree(FOREIGN, ignore_errors=True)
peft.export(LORA, FOREIGN, base_model="my-base")
chosen = ("r", "lora_alpha", "use_rslora", "target_modules")
written = json.loads((FOREIGN / "adapter_config.json").read_text())
print({name: written[name] for name in chosen})
content = (FOREIGN / "adapter_model.safetensors").read_bytes()
n = int.from_bytes(content[:8], "little")
print(f"{len(content):,} bytes = 8 + {n:,} of JSON + {len(content) - 8 - n:,} of numbers")
print(content[8:240].decode(), "...")
numbers = sum(tensor.numel() for tensor in peft.read(FOREIGN).tensors.values())
assert len(content) == 8 + n + 4 * numbers  # fp32

# %% [markdown]
# Two things to know about these files. The factor s is not in the tensors: forget
# use_rslora, and the update is too small by sqrt(r). And they name their base, but do not
# identify it: an adapter on another model of the same shape loads without an error, and
# writes nonsense. A run of this project also stores a fingerprint of its base.
#
# ## 8. Which settings to begin with
#
#   lora_targets  all     with adapters on all linear layers LoRA keeps up with full
#                         finetuning, with fewer it does not (QLoRA, 2305.14314)
#   lora_rank     8       LoRA's authors lose little at 1 to 4 (2106.09685); code and
#                         mathematics in large amounts profit from up to 256 (2405.09673)
#   lora_alpha    16      at every rank: alpha / r falls as terms are added, so lr can stay.
#                         From rank 64 on use --rslora, alpha / sqrt(r): alpha / r makes the
#                         movement of W too small there, and high ranks learn no more than
#                         low ones (2312.03732)
#   lr            2e-4    for 7B, QLoRA's. Many times the rate for all weights
#
# The numbers in brackets are papers on arXiv. Why may lr be so much higher? Adam moves each
# number that trains by about lr in a step. In full finetuning that is each element of W.
# Here it is B, and W moves only through s B A. So the first step moves an element of W by
#
#   lr * s * (sum of r elements of A with random signs), A within +-1 / sqrt(in)

# %%
cells = []
for n_in, rank in ((256, 8), (4096, 1), (4096, 8), (4096, 64), (4096, 256)):
    A = (2 * torch.rand(rank, n_in) - 1) / math.sqrt(n_in)
    signs = torch.randint(2, (64, rank)) * 2.0 - 1  # of the gradient of B
    moved = (signs @ A).square().mean().sqrt().item()
    usual, stabilized = 16 / rank * moved, 16 / math.sqrt(rank) * moved
    cells.append((n_in, rank, f"{usual:.3f}", f"{stabilized:.3f}"))
    if (n_in, rank) == (4096, 8):
        assert 0.045 < usual < 0.056
print("movement of W / lr, with s = ...")
print(program.table(("in", "rank", "alpha / r", "alpha / sqrt(r)"), cells))

# %% [markdown]
# At rank 8 and 4,096 inputs W moves by 0.05 lr: 2e-4 does to W what 1e-5 does in full
# finetuning. (configs/finetune_mpt7b.py, which trains all weights, has 5e-6.) With alpha /
# r the movement falls as 1 / sqrt(r): little between neighbouring ranks, to a third from
# rank 8 to 64. With alpha / sqrt(r) it is the same at every rank, 2.8 times that of rank 8
# with alpha / r.
#
# On the demo the rate matters more than the rank: --lr=3e-3 in place of 1e-3 learns less,
# 91.5 %, and forgets much more, 7.302. All weights (--lora_rank=0 --lr=3e-4, no other rate
# was tried) give 98.8 % and 5.400: hardly better, in checkpoints of 49 MB and not 2.5.
# lessons/finetuning.md has the table, one run of 300 steps each.
#
# When not to use LoRA: to teach much that is new, such as a language or billions of tokens;
# there it learns less than full finetuning, and forgets less (2405.09673). Nor for new
# tokens, since embeddings are not trained. And if all weights and Adam's state fit, and you
# keep one model only, training all weights is simpler.
#
# From your own lines of prompts and responses to a model that answers:
# lessons/finetuning.md.
#
# ## The exercise
#
# `python -m lessons check 7` puts lessons/mine/7_finetuning.py there and checks it. Write
# forward and backward of a LoRA layer, without a tensor as large as W; merge, which rounds
# once, at the end, and unmerge.
#
# A hint for backward: write low = A x, then y = W x + s B low, and apply the chain rule to
# each of the two products. Check the shapes: only one order of factors fits.
#
# ## Three questions
#
# 1. In the project's run on the demo, the largest term of each update gives more than half
#    of the answers. What does a run of rank 1 learn?
# 2. Adapters in the last block alone are a quarter of the adapters' parameters: the demo
#    has four blocks. The backward pass stops early. What do they learn, and what do they
#    forget? Guess, then run the command in the answer (a minute).
# 3. How many bytes are the adapters of MPT-7B, at rank 8 on all linear layers, and Adam's
#    state for them? (Section 1 has the numbers of one block; there are 32.)
#
# ## What to read next
#
# - Hu et al., LoRA: Low-Rank Adaptation of Large Language Models. 2021, arXiv:2106.09685
# - Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs. 2023, arXiv:2305.14314
# - Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA. 2023,
#   arXiv:2312.03732
# - Biderman et al., LoRA Learns Less and Forgets Less. 2024, arXiv:2405.09673
# - Aghajanyan, Zettlemoyer, Gupta, Intrinsic Dimensionality Explains the Effectiveness of
#   Language Model Fine-Tuning. 2020, arXiv:2012.13255
# - Eckart and Young, The Approximation of One Matrix by Another of Lower Rank.
#   Psychometrika, 1936

# %%
# Scroll on for the answers.

# %% [markdown]
# ## Answers
#
# The figures are of one run each, from the demo, 300 steps, all 401 held-out questions.
#
# 1. Nearly all: 94.8 %, and it forgets a little more, 5.709 nats. A run of rank 1 puts into
#    its one term what it needs. The largest term of a run of rank 8 is only a part of what
#    that run has learned: alone it answers more than half, 56.4 %. After `make finetune`:
#
#      python fsdp_train.py configs/lora_demo.py --lora_rank=1 --run_dir=runs/lora-1
#
# 2. 72.1 % of the answers, and 5.827 nats: they learn less, and forget a little more.
#
#      python fsdp_train.py configs/lora_demo.py --lora_last_blocks=1 --run_dir=runs/last
#
#    To see both: python -m lessons.finetuned runs/demo runs/lora-demo runs/lora-1 runs/last
#
# 3. 16,777,216 numbers (configs/lora_mpt7b.py): 67 MB in fp32, and twice that for Adam. If
#    all 6.65 billion weights trained, Adam's state alone would be 53 GB.

"""Lesson 0. Ten minutes."""

# %% [markdown]
# # Lesson 0. Ten minutes
#
# You will train a language model on this machine, look at what the run leaves behind, change
# one setting, and lay the two curves over each other. That is the whole craft in small: the
# rest of the workshop explains what happens inside.
#
# The textbook is fsdp_train.py, from `main` down, and configs/demo.py. You need nothing but
# a terminal in the project's folder, in which `source .venv/bin/activate` was typed. It
# shows words and output; for the code between them open lessons/0_ten_minutes.py.

# %%
import sys

sys.path += [".", ".."]  # the project: an editor may start cells in the file's folder
SHORT = "--short" in sys.argv  # fewer and smaller runs, for a first look and for the tests

import math
import subprocess
from pathlib import Path

from matplotlib.figure import Figure

import config
import flops
from config import MPTConfig, TrainConfig
from lessons import pictures
from lifecycle import runlog

STEPS = 20 if SHORT else 150
SMALL = "--d_model=64 --n_layers=2 --tokenizer=bytes --vocab_size=257"
SIZE = f"{SMALL} --warmup_steps=5 --eval_tokens=20000".split() if SHORT else []

# %% [markdown]
# ## 1. Train
#
# The demo is a transformer that reads the source of Python's standard library, which is on
# every machine that has Python: nothing is downloaded. Its settings are one flat file,
# configs/demo.py. Every one of them, and every other field of config.py, is also a flag:
#
#     python fsdp_train.py configs/demo.py --max_steps=150 --run_dir=runs/lessons/0-base
#
# The lesson runs it now (with --short: a smaller model, 20 steps). Read what it says: the
# sizes of the model, the device, the data, and then every two seconds the line of a step
# (metrics.jsonl has all of them). The loss of a step is the mean of -log p(next token), in
# nats: how surprised the model was by the text that came. The validation loss is that of text
# which it never learns from. You need only these two and `lr`, the learning rate. Later
# lessons explain the rest, and GLOSSARY.md every word.


# %%
def train(name: str, *flags: str) -> Path:
    """Train the demo for STEPS steps with more flags. Returns the run folder."""
    folder = Path("runs/lessons") / (f"0-short-{name}" if SHORT else f"0-{name}")
    program = [sys.executable, "fsdp_train.py", "configs/demo.py", *SIZE, *flags]
    program += [f"--max_steps={STEPS}", f"--run_dir={folder}"]
    # The peak is not measured here. A finished run of another day is kept as NAME-1.
    program += ["--peak_tflops=auto", "--resume=again"]
    print("$ python", *program[1:], flush=True)
    done = subprocess.run(program, cwd=pictures.ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    assert done.returncode == 0, f"{name} failed: the lines above say why"
    return pictures.ROOT / folder


base = train("base")

# %% [markdown]
# If the new model found every token equally likely, the first loss would be -log(1 / V) =
# log V. It is about a nat higher: the new model's logits are random numbers with a variance
# s^2 of about 2, and that raises the mean loss by s^2 / 2. A run that starts far from there
# has a bug, or weights that know something already. Look at this first, in any run.

# %%
rows = [row for row in runlog.read(base) if "loss" in row]
[m, cfg] = config.load(["configs/demo.py", *SIZE], MPTConfig, TrainConfig)
first, last = rows[0]["loss"], rows[-1]["loss"]
print(f"log({m.vocab_size:,}) = {math.log(m.vocab_size):.2f} nats, and the first loss {first:.2f}")
print(f"after {len(rows)} steps: {last:.2f}")
assert abs(first - math.log(m.vocab_size)) < 1.5
assert last < first - 0.3

# %% [markdown]
# ## 2. Look at the run folder
#
# A run explains itself. Whoever finds the folder in a year can read what was run, on what,
# with which settings, and what came of it:
#
#     config.json      every setting, also those that you did not set
#     launches.jsonl   each start: command, versions, devices, ranks
#     metrics.jsonl    a line a step, and a line for each validation
#     checkpoints/     weights and optimizer, from which the same command resumes
#     tokenizer.json   what turns text into the ids that this model knows; bytes need none
#     lease.json       which process owns the folder: a second run would be refused

# %%
for path in sorted(base.iterdir()):
    print(f"  {path.name}{'/' * path.is_dir()}")
launch = runlog.read_launches(base)[-1]
print("\nlaunches.jsonl, some of the last line:")
for name in ("time", "first_step", "torch", "ranks", "device", "command"):
    print(f"  {name:<18} {launch.get(name)!s:.60}")
print("\nmetrics.jsonl, the last step:")
for name in ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"):
    print(f"  {name:<18} {rows[-1][name]}")

# %% [markdown]
# `tokens` counts what the model has read so far, and `lr` is the learning rate of the step:
# it rises for `warmup_steps` steps and falls again. How many tokens is that per parameter?

# %%
n_params = flops.n_params(m)
tokens = rows[-1]["tokens"]
print(f"{n_params:,} parameters have seen {tokens:,} tokens, {tokens / n_params:.2f} for each")
print("(Lesson 8 is about how many it should be.)")
assert tokens == STEPS * cfg.global_batch_size * m.max_seq_len

# %% [markdown]
# ## 3. Change one setting
#
# Four times the learning rate: each step moves the weights four times as far. Everything
# else stays, the order of the text too. So whatever differs comes from this one setting.

# %%
hot = train("hot", "--lr=8e-3")

# %%
hot_rows = [row for row in runlog.read(hot) if "loss" in row]
both = list(zip(rows, hot_rows, strict=True))
same_text = all(row["batch_hash"] == other["batch_hash"] for row, other in both)
print(f"{len(both)} steps; the same tokens in every step: {same_text}")
assert same_text

# %% [markdown]
# ## 4. Overlay the curves
#
# `python -m lifecycle.plot runs/lessons/0-base runs/lessons/0-hot` draws this in the
# terminal and as a picture. Here it is by hand. A training curve is noisy, since every step
# reads other text, so the thick lines are running means.


# %%
def running_mean(values: list[float], window: int = max(2, STEPS // 15)) -> list[float]:
    """The mean of each value and the ones before it, at most `window` of them."""
    windows = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


figure = Figure(figsize=(7, 4))
axes = figure.subplots()
for label, series, style in (("lr 2e-3", rows, "-"), ("lr 8e-3", hot_rows, "--")):
    x = [row["tokens"] / 1000 for row in series]
    y = [row["loss"] for row in series]
    axes.plot(x, y, style, color="0.7", linewidth=0.7)
    axes.plot(x, running_mean(y), style, color="black", label=label)
axes.set(title="One setting changed", xlabel="thousand tokens", ylabel="loss (nats per token)")
axes.legend()
pictures.save(figure, "0-two-rates")

# %% [markdown]
# In these few steps the higher rate usually wins, and that is a trap: the best rate of a
# short run is too high for a long one, and a little higher still the run falls apart. Where
# is that edge? You find it in the exercise.
#
# ## The exercise
#
# `python -m lessons check 0` makes lessons/mine/0_ten_minutes.py for you. It has three parts:
#
# 1. Predict, before you run anything: which of three learning rates diverges, that is, ends
#    above the loss it started with?
# 2. Run all three, and write down the losses at which they end.
# 3. Write a function that reads a run's losses from its metrics.jsonl.
#
# ## Three questions
#
# 1. The first step's learning rate is 0. Why? And what does the difference between the losses
#    of steps 1 and 2 tell you?
# 2. A run reports 5.0 nats per token with a vocabulary of 4,096, another 5.5 nats with one of
#    50,000. Which model is better?
# 3. You stop the run with Ctrl-C at step 80 and type the same command. What happens to the
#    curve, and what would a colleague see who looks at metrics.jsonl?
#
# `python -m lessons 0 --answers` prints the answers.
#
# ## What to read next
#
# - "A Recipe for Training Neural Networks", Andrej Karpathy, 2019: why to look at everything.
# - "Cyclical Learning Rates for Training Neural Networks", Leslie Smith, 2015 (1506.01186):
#   finding the edge of the learning rate by raising it until the loss blows up.
# - fsdp_train.py::main and fsdp_train.py::train_step, with the README's picture of a step.

# Scroll on for the answers.

# %% [markdown]
# ## Answers
#
# 1. Warmup: the rate rises in a line from 0 over `warmup_steps` steps, since Adam's averages
#    know nothing yet and its first steps would be too bold. The second step's loss is still
#    that of the untouched weights, on other text: the difference between the first two losses
#    is the noise of the batches alone.
# 2. It cannot be told from these figures: they count nats per token, and the second model's
#    tokens are longer. Divide by the bytes that a token stands for. `val_bits_per_byte` does
#    that, and can be compared across tokenizers.
# 3. Ctrl-C lets the step end and saves, so the run goes on at the next one with the same order
#    of text. The curve is the same as without the pause, bit for bit on the same ranks.
#    metrics.jsonl has no step twice; launches.jsonl has a second line.

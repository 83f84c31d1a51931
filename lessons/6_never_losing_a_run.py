"""Lesson 6. Never losing a run."""

# %% [markdown]
# # Lesson 6. Never losing a run
#
# A long run is interrupted: by a failed device, a full disk, the end of a time slot. Failures alone
# come every three hours on sixteen thousand devices and, at the same rate for each device, every
# two days on a thousand (section 6). The run survives because it saves checkpoints and continues
# from the newest. You will see what a checkpoint must hold, kill real runs, and move one to other
# numbers of ranks.
#
# An hour. The textbook is checkpoint.py; storage/files.py and lifecycle/resume.py belong to it.

# %%
import sys

sys.path += [".", ".."]  # the project: an editor may start cells in the file's folder
SHORT = "--short" in sys.argv  # fewer and smaller runs, for a first look and for the tests

import copy
import functools
import inspect
import json
import math
import os
import shutil
import signal
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import checkpoint
import data
import model as mpt
import optim
import program
from config import MPTConfig, TrainConfig
from lessons import changes, elastic, pictures
from lifecycle import plot, runlog
from storage import checkpoint_files, files

# %% [markdown]
# ## 1. What a checkpoint must hold
#
# The next step of a run depends on
#
#     weights          theta
#     optimizer        Adam's running means m and v of the gradient and of its square
#     step             t, which decides the learning rate lr(t)
#     data position    which tokens come next
#     random state     the generator that draws the dropout masks
#
#     (theta, m, v, t, position, random) -> the same, one step later
#
# Here is a small MPT, with the project's model, optimizer and schedule, on the text of a module
# of Python's library. It reads the text from front to back, so it has a position to remember, and
# it draws dropout masks from torch's global generator, as most training programs do.

# %%
HALF = 20 if SHORT else 100  # steps before the checkpoint, and as many after it
B, T = 8, 64  # sequences of a batch, tokens of a sequence
SMALL = MPTConfig(
    d_model=64, n_heads=2, n_layers=2, max_seq_len=T, vocab_size=256, alibi=True, resid_pdrop=0.1
)
RECIPE = TrainConfig(lr=3e-3, warmup_steps=10, max_steps=2 * HALF)
TEXT = torch.tensor(list(inspect.getsource(inspect).encode()))
torch.set_num_threads(1)  # faster for so small a model, and the sums have one order


class Trainer:
    """A training run in one process, with all that it must remember."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = mpt.MPT(SMALL).train()
        mpt.init_weights(self.model, seed=1)
        self.optimizer = optim.build_optimizer(self.model.named_parameters(), RECIPE)
        self.step = self.position = 0

    def take_step(self) -> float:
        """One step. Returns the loss in nats per token."""
        rows = TEXT[self.position : self.position + B * (T + 1)].view(B, T + 1)
        self.position += B * (T + 1)
        loss = self.model(rows[:, :-1], labels=rows[:, 1:]) / (B * T)  # the model sums
        loss.backward()
        self.optimizer.param_groups[0]["lr"] = optim.learning_rate(self.step, RECIPE)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def state(self) -> dict:
        """The five things."""
        return {
            "weights": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "step": self.step,
            "data position": self.position,
            "random state": torch.get_rng_state(),
        }

    def restore(self, state: dict) -> None:
        """Take over what is in `state`; the rest stays as in a new run."""
        state = self.state() | state
        self.model.load_state_dict(state["weights"])
        optimizer = copy.deepcopy(state["optimizer"])  # the optimizer keeps these tensors
        self.optimizer.load_state_dict(optimizer)
        self.step, self.position = state["step"], state["data position"]
        torch.set_rng_state(state["random state"])


assert len(TEXT) > 2 * HALF * B * (T + 1), "the text is long enough for one pass"

# %%
# The run that nobody interrupts, with a checkpoint in the middle.
unbroken = Trainer()
losses = [unbroken.take_step() for _ in range(HALF)]
saved = unbroken.state()
losses += [unbroken.take_step() for _ in range(HALF)]
print(f"{2 * HALF} steps: loss {losses[0]:.3f} at the first, {losses[-1]:.3f} nats at the last")


# %% [markdown]
# Now the run stops after the checkpoint. A new process would begin with a new Trainer, restore
# the checkpoint, and go on. First with all five, then each of them is left out once.


# %%
def resumed(left_out: str | None) -> tuple[list[float], float]:
    """Of a run that restored all of the checkpoint but one part: (losses, size of first update).

    The size: the root of the mean square over all weights, divided by the learning rate of this
    step in the run that nobody interrupts.
    """
    trainer = Trainer()
    trainer.restore({name: value for name, value in saved.items() if name != left_out})
    weights = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    curve = [trainer.take_step()]
    update = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach() - weights
    size = update.square().mean().sqrt().item() / optim.learning_rate(HALF, RECIPE)
    return curve + [trainer.take_step() for _ in range(HALF - 1)], size


after = losses[HALF:]
curve, usual_size = resumed(None)
assert curve == after, "with all five, each loss is the same, bit by bit"
cells = [("nothing", "none", "0 nats", f"{usual_size:.2f}")]
curves, sizes = {}, {}
for name in saved:
    curves[name], sizes[name] = resumed(name)
    apart = [abs(b - a) for a, b in zip(after, curves[name], strict=True)]
    first = next(step for step, difference in enumerate(apart, 1) if difference)
    cells.append((name, first, f"{max(apart):.3f} nats", f"{sizes[name]:.2f}"))
heads = ("left out", "first step that differs", "largest difference", "first update: RMS / lr")
print(program.table(heads, cells))

n_bytes = HALF * B * (T + 1)
print(f"\nwithout the position: the {n_bytes:,} bytes of the first half are read once more")
rates = [optim.learning_rate(step, RECIPE) for step in (0, HALF)]
print(f"without the step: the learning rate of the next step is {rates[0]:.1e}, not {rates[1]:.1e}")
assert sizes["optimizer"] > 2 * usual_size and sizes["step"] == 0

# %% [markdown]
# Without the weights, the run starts again, as one would expect; everybody notices.
#
# Without the optimizer, m = v = 0, and Adam's first update is lr * g / |g|: each weight moves by
# a full learning rate, however small its gradient g is. Compare it with "nothing" in the last
# column. Without the step, the warmup comes a second time, and its first rate is 0. The loss of
# step 1 is computed before the first update, so in both cases step 2 is the first that differs.
# They are seldom noticed, since the loss recovers.
#
# Without the position, the run reads once more what it has read, and in the same number of steps
# never sees the rest. Without the random state only the masks differ. That does no harm to the
# model, but nobody can tell any more whether something else is wrong: "the same bit by bit" is a
# test that finds everything, and "about as good" finds next to nothing.

# %%
figure = Figure(figsize=(12, 4.6), layout="constrained")
upper, lower = figure.subplots(2, len(curves), sharex=True, sharey="row", height_ratios=[3, 2])
steps = range(HALF + 1, 2 * HALF + 1)
for column, (name, curve) in enumerate(curves.items()):
    axes = upper[column]
    axes.plot(range(1, 2 * HALF + 1), losses, color="0.7", linewidth=3, label="never interrupted")
    axes.plot(steps, curve, color="black", linewidth=1, label="resumed")
    axes.set_title(f"without {name}", fontsize=10)
    apart = [abs(b - a) or math.nan for a, b in zip(after, curve, strict=True)]  # no log of 0
    lower[column].semilogy(steps, apart, color="black", linewidth=1)
    lower[column].set_xlabel("step")
    for axes in (upper[column], lower[column]):
        axes.axvline(HALF + 0.5, color="black", linestyle=":", linewidth=1)
upper[0].set_ylabel("training loss (nats per token)")
lower[0].set_ylabel("difference (nats)")
upper[-1].legend(fontsize=8)
figure.suptitle("A run that resumes from a checkpoint in which one part is missing")
pictures.save(figure, "6-left-out")

# %% [markdown]
# ## Two of the five need not be saved
#
# The project's checkpoints hold weights, optimizer and step. The data position and the random
# state are functions of the step. data.py::Split.batch says which windows of text step s reads:
#
#     sample = s * global_batch + i,   i = 0 ... global_batch - 1
#     window = permutation(sample),    computed for this one number, from the seed
#
# Nothing is remembered, so nothing can be forgotten. And no rank appears in it: each of n ranks
# takes an n-th of the i. parallel.py::seed_dropout does the same for the masks.

# %%
windows = 10_000  # of a data set
step, batch = 137, 8
samples = step * batch + np.arange(batch)
alone = data.permute(samples, windows, seed=1337, epoch=0)
halves = [data.permute(part, windows, seed=1337, epoch=0) for part in (samples[:4], samples[4:])]
print(f"the windows of step {step}, on one rank:  {alone}")
print(f"                   and on two ranks:  {halves[0]} {halves[1]}")
assert (alone == np.concatenate(halves)).all()

everything = data.permute(np.arange(windows), windows, seed=1337, epoch=0)
assert len(set(everything.tolist())) == windows
print(f"{windows} samples read each of {windows} windows once")

# %% [markdown]
# Each step logs batch_hash, a 64-bit number made of the ids that the step saw, in their order.
# The ranks hash their own rows, and the sum is the hash of the whole batch (data.py::batch_hash).
# Two runs with equal hashes at a step have read the same tokens there.

# %%
rows = torch.randint(0, 256, (batch, T + 1), generator=torch.Generator().manual_seed(0))
whole = data.batch_hash(rows, 0)
on_two = data.batch_hash(rows[:4], 0) + data.batch_hash(rows[4:], 1)
swapped = rows.clone()
swapped[0, [0, 1]] = rows[0, [1, 0]]
print(f"one rank {whole.item()}\ntwo      {on_two.item()}")
print(f"two ids swapped: {data.batch_hash(swapped, 0).item()}")
assert whole == on_two and whole != data.batch_hash(swapped, 0)

# %% [markdown]
# ## 2. kill -9 in the middle of a real run
#
# A process cannot catch SIGKILL (kill -9): it ends between two instructions. This is the run of
# configs/demo.py with a smaller model. A checkpoint is due every few steps. It is started, killed
# past the middle, and started again by the same command.

# %%
STEPS = 120 if SHORT else 400
EVERY = 20 if SHORT else 40
FOLDER = pictures.FOLDER
FLAGS = [f"{pictures.ROOT}/configs/demo.py", f"--data_dir={FOLDER}/6-data"]
FLAGS += f"""
    --d_model=64 --n_heads=2 --n_layers=2 --max_seq_len=64 --vocab_size=257
    --tokenizer=bytes --max_tokens=500000 --device=cpu --precision=fp32
    --lr=3e-3 --warmup_steps=20 --max_steps={STEPS} --eval_interval={STEPS} --eval_tokens=4000
    --save_interval={EVERY} --resume=auto --peak_tflops=auto
""".split()
killed = FOLDER / "6-killed"
log = FOLDER / "6-killed.log"
shutil.rmtree(killed, ignore_errors=True)
FOLDER.mkdir(parents=True, exist_ok=True)
log.unlink(missing_ok=True)
shown = " ".join([*FLAGS, f"--run_dir={killed}"]).replace(f"{pictures.ROOT}/", "")
lines = textwrap.wrap(f"python fsdp_train.py {shown}", 86, break_on_hyphens=False)
print(" \\\n    ".join(lines), end="\n\n")


# %%
def train_until(condition, ranks: int = 1) -> float:
    """Start the run; when `condition()` holds, kill -9. Returns the seconds that it ran."""
    begin = time.monotonic()
    launch = elastic.Launch([*FLAGS, f"--run_dir={killed}"], ranks, log)
    try:
        while launch.status() is None:
            if condition():
                launch.send(signal.SIGKILL)
            time.sleep(0.01)
    finally:
        launch.end()
    return time.monotonic() - begin


def past_the_middle() -> bool:
    """Whether half of the steps are done, and some since the newest checkpoint."""
    newest = checkpoint.latest(killed)
    done = elastic.steps_done(killed) if newest else 0
    return done > STEPS // 2 and done % EVERY > EVERY // 3


def steps_of(run: Path) -> dict[int, dict]:
    """{step: its row} of the training steps in metrics.jsonl."""
    return {row["step"]: row for row in runlog.read(run) if "loss" in row}


seconds = train_until(past_the_middle)
before = steps_of(killed)
newest = checkpoint.latest(killed)
kept = checkpoint.number(newest)
print(f"killed after {seconds:.1f} s at step {max(before)} of {STEPS}; newest: {newest.name}")
print(f"{max(before) - kept} steps are lost and must be taken again")
if max(before) == STEPS:
    print("It ended before the kill: this machine is fast. Run the lesson again to see one.")
print("left in the folder:", *sorted(os.listdir(newest.parent)))

# %%
seconds = train_until(lambda: False)
again = steps_of(killed)
print(f"started again, and finished after {seconds:.1f} s. It said:")
for line in log.read_text().splitlines():
    if "resuming" in line:
        print("   ", line.replace(f"{pictures.ROOT}/", ""))
assert list(again) == [*range(1, STEPS + 1)], "every step is there, and none twice"

cells = []
repeated = [step for step in before if step > kept]
for step in repeated:
    a, b = before[step], again[step]
    cells.append((step, a["batch_hash"], b["batch_hash"], f"{a['loss']:.6f}", f"{b['loss']:.6f}"))
    assert a["batch_hash"] == b["batch_hash"] and a["loss"] == b["loss"]
print(program.table(("step", "batch_hash before", "after", "loss before", "after"), cells[:4]))
print(f"all {len(repeated)} repeated steps: the same tokens and, bit by bit, the same loss")

# %% [markdown]
# ## 3. What is in a checkpoint, and how damage is found
#
#     checkpoints/step-N.tmp/    being written. If the process dies, it stays until the next start,
#                                  which sweeps it away
#     checkpoints/step-N/        renamed when the last byte is on disk
#
# checkpoint.py::Checkpointer writes it in a thread, while the training goes on with the next
# steps. The files: each rank's pieces of all tensors, .metadata (which piece is where), meta.json
# (step, settings, fingerprint of the data), and checksums.json, the manifest.

# %%
newest = checkpoint.latest(killed)
manifest = json.loads((newest / "checksums.json").read_text())
for name, (size, crc) in manifest.items():
    print(f"{name:<14} {size:>9,} bytes   crc32 {crc:08x}")
meta = json.loads((newest / "meta.json").read_text())
print({name: meta[name] for name in ("step", "seed", "data_fingerprint", "optimizer")})

n_params = sum(p.numel() for p in mpt.MPT(checkpoint_files.read_settings(newest)).parameters())
size = manifest["__0_0.distcp"][0]
print(f"\n{n_params:,} parameters; {size / n_params:.1f} bytes each: fp32 weight, m and v are 12.")
print("The rest are names and headers, which in a large model are nothing beside the numbers.")

# %% [markdown]
# Disks and copies change bits without telling anybody. One bit of the weights is changed in a
# copy. The file still has its size and still loads; the model is another one. The manifest shows
# it. lifecycle/resume.py then renames the checkpoint to step-N.damaged and takes the one before.

# %%
with tempfile.TemporaryDirectory() as folder:
    damaged = Path(folder) / newest.name
    shutil.copytree(newest, damaged)
    print("the copy:          ", checkpoint_files.find_damage(damaged) or "sound")
    content = bytearray((damaged / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "__0_0.distcp").write_bytes(content)
    fault = checkpoint_files.find_damage(damaged)
    print("one bit changed:   ", fault)
    assert "checksum differs" in fault
    (damaged / "__0_0.distcp").write_bytes(content[: len(content) // 2])
    fault = checkpoint_files.find_damage(damaged)
    print("cut in the middle: ", fault)
    assert "bytes instead of" in fault

# %% [markdown]
# ## 4. What a kill leaves of a file
#
# A file is replaced, and the process is killed just before each of the changes that it makes, one
# after another: the obvious way, and by storage/files.py::write_atomically. lessons/changes.py
# counts the changes and kills; a file that is open keeps half of its bytes, as after a power
# failure. What a reader finds then:


# %%
def overwrite(path, content):
    """Write a file the obvious way."""
    with open(path, "wb") as file:
        file.write(content)


changes.report_fsyncs()  # so that they count, too
OLD, NEW = b"step 100: " + b"a" * 90, b"step 200: " + b"b" * 90
cells, found = [], {}
for write in (overwrite, files.write_atomically):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        replace = functools.partial(write, path, NEW)
        for at, name in enumerate([*changes.in_a_copy(replace).names, "(it ends)"]):
            for left in Path(folder).iterdir():
                left.unlink()
            path.write_bytes(OLD)
            changes.in_a_copy(replace, at)
            content = path.read_bytes()
            lost = f"LOST: {len(content)} of {len(NEW)} bytes"
            what = {OLD: "old", NEW: "new"}.get(content, lost)
            beside = " and ".join(left.name for left in Path(folder).glob("*.tmp"))
            cells.append((write.__name__, at, name, what, beside))
            found.setdefault(write, set()).add(what)
print(program.table(("", "killed before", "", "a reader then finds", "beside it"), cells))
assert found[files.write_atomically] == {"old", "new"}
assert not found[overwrite] <= {"old", "new"}

# %% [markdown]
# The recipe, in this order:
#
#   1. write all of it to a temporary file in the same folder
#   2. flush: from Python's buffer to the operating system
#   3. fsync: from the operating system's memory to the disk
#   4. rename: POSIX promises that a reader finds the old file or the new one, nothing else
#   5. fsync of the folder (os.open it with O_RDONLY): the new name is on disk, too
#
# Steps 1 to 4 are storage/files.py::write_and_rename; step 5 is in
# checkpoint.py::Checkpointer.publish. A file from `write_atomically` goes without step 5: after a
# power failure its readers may find the old content, which is whole.
#
# A checkpoint of many files works in the same way: checkpoint.py writes a folder step-N.tmp and
# renames the folder. Then it removes what is too old: last of all, never first.
#
# A kill -9 alone needs no fsync: what the operating system has taken, it writes later. A power
# failure does. So the obvious test, killing the process, cannot show that fsync is missing.
#
# What does fsync cost? It takes as long as the disk needs for the bytes; the write alone ends when
# they are in memory. If both take about as long here, this system writes through to its disk, or
# the folder is in memory and there is no disk to wait for.

# %%
content = os.urandom(2**24)
with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
    for sync in (False, True):
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            with open(f"{folder}/file", "wb") as file:
                file.write(content)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            times.append(time.perf_counter() - begin)
        name = "write and fsync" if sync else "write alone"
        print(f"{name:<16} {1e3 * sorted(times)[1]:7.1f} ms for 16 MiB (the median of 3)")

# %% [markdown]
# ## 5. From 1 rank to 2, to 4, and back
#
# The machine that a run continues on may be another one. A checkpoint holds each tensor as pieces
# with their place in the whole, so any number of ranks can read what it needs. With other ranks
# the same sums are taken in another order, which gives other rounding errors. So the losses may
# differ in the last digits, and training makes such differences grow. The tokens must be the same.
#
# lessons/elastic.py keeps a run going: it starts it again until it is finished. Each part has a
# run folder of its own, as on another cluster; what they share is an object store, to which the
# run is mirrored (--remote). `make elastic` is the longer demonstration, with --tp and --pp.

# %%
parts = [
    elastic.Part(1, 0.25, signal.SIGTERM),  # asked to stop: it saves first
    elastic.Part(2, 0.5, signal.SIGTERM),
    elastic.Part(4, 0.75, signal.SIGKILL),  # all ranks are killed while a checkpoint is copied
    elastic.Part(1),
]
folder = FOLDER / "6-elastic"
if SHORT:
    print("Not run: it takes five launches, which python -m lessons 6 makes without --short.")
    print("A stored result instead, of `make elastic` (bench/results/cpu.md, 2026-11-26): a larger")
    print("model, 250 steps, on 1 rank, and moved: 1 -> 2 -> tp 2 x pp 2 -> 1 rank")
    print("    losses                  at most 2.1e-5 nats per token from those on 1 rank")
    print("    final validation loss   5.3514 in both")
else:
    shutil.rmtree(folder, ignore_errors=True)  # of another day, perhaps of another version
    unmoved = folder / "one"
    elastic.supervise(unmoved, FLAGS, elastic.Part(1), STEPS)
    *_, moved = elastic.move(folder, FLAGS, parts, STEPS)
    elastic.check([unmoved, moved], STEPS)
    print("restarts:", plot.restart_labels(str(moved)))

# %%
if not SHORT:
    a, b = steps_of(unmoved), steps_of(moved)
    assert all(a[step]["batch_hash"] == b[step]["batch_hash"] for step in a)
    apart = {step: abs(a[step]["loss"] - b[step]["loss"]) for step in a}
    print(f"largest difference of the losses: {max(apart.values()):.1e} nats per token")
    same = [a[step]["loss"] == again[step]["loss"] for step in a]
    assert all(same), "one rank, killed or not: bit by bit"
    print("and the run of part 2, killed on one rank: no difference at all from the unmoved one")

    command = [str(unmoved), str(moved), f"--out={FOLDER}/6-moved.png", "--diff"]
    print("$ python -m lifecycle.plot", program.shell(*command).replace(f"{pictures.ROOT}/", ""))
    plot.main(command)

# %% [markdown]
# ## 6. How often to save
#
# A save costs d seconds of training. Failures come every M seconds on average, and each loses the
# work since the last save, T/2 on average for saves every T seconds. The share of time lost is
#
#     f(T) = d / T + T / (2 M)
#
# f'(T) = -d / T^2 + 1 / (2 M) = 0  gives Young's rule (1974):  T = sqrt(2 d M),  f = sqrt(2 d / M)
#
# The report on Llama 3 (2024) counts 419 unexpected interruptions in 54 days on up to 16,384 GPUs.

# %%
M = 54 * 24 * 3600 / 419  # seconds between two of them
print(f"a failure every {M / 3600:.1f} hours")
cells = []
for d in (1, 10, 60):
    tried = np.geomspace(10, M, 20_000)
    lost = d / tried + tried / (2 * M)
    best = tried[lost.argmin()]
    assert math.isclose(best, math.sqrt(2 * d * M), rel_tol=1e-2)
    cells.append((d, f"{best / 60:.1f} min", f"{lost.min():.1%}"))
print(program.table(("seconds of a save", "save every", "share of time lost"), cells))

# %% [markdown]
# That is why checkpoint.py writes in the background: only the copy to host memory stops the
# training, so d is small although the file is large. The measured figures of this project are
# in bench/results/cpu.md.
#
# ## The exercise
#
# `python -m lessons check 6` puts lessons/mine/6_never_losing_a_run.py there and checks it. It has
# a naive checkpointer, which works as long as nobody pulls the plug. Find the kill that loses its
# data, and the one that makes it return what was never saved; then write a better one.
#
# A hint: decide first which single change makes the new checkpoint count. All that comes before
# it must be invisible to load; nothing that load needs may come after it.
#
# ## Three questions
#
# 1. A run of the first part loses its optimizer state at each restart, but nothing else, and it is
#    restarted every 1,000 steps. Who would notice, and by what?
# 2. A save overwrites the files of the checkpoint before it, in the same folder, and is killed in
#    the middle. Why is that worse than losing both?
# 3. The newest checkpoint has the right checksums, but its weights hold a NaN. How could it have
#    come there, and what does this project do about it?
#
# ## What to read next
#
# - Young, A first order approximation to the optimum checkpoint interval. CACM, 1974
# - Pillai et al., All File Systems Are Not Created Equal: On the Complexity of Crafting
#   Crash-Consistent Applications. OSDI 2014
# - Rebello et al., Can Applications Recover from fsync Failures? USENIX ATC 2020
# - Mohan, Phanishayee, Chidambaram, CheckFreq: Frequent, Fine-Grained DNN Checkpointing. FAST 2021
# - Wang et al., Gemini: Fast Failure Recovery in Distributed Training with In-Memory
#   Checkpoints. SOSP 2023
# - The Llama 3 Herd of Models, the section on reliability. 2024, arXiv:2407.21783

# %%
# Scroll on for the answers.

# %% [markdown]
# ## Answers
#
# 1. Hardly anybody: in part 1 the loss changed by less than it differs from one batch to the next.
#    What finds it is the test of this lesson: restart a short run, and compare with one that was
#    not restarted. Equal bit by bit is easier to judge than "about as good".
# 2. The folder holds new pieces beside old ones, and an old list of them. It looks complete and
#    loads without an error, and the model is a mixture that nobody trained. A missing checkpoint
#    is noticed. So no path is ever written twice (checkpoint.py), and checksums show mixtures.
# 3. The training diverged, or a device computed wrongly, and then a sound file was written of it.
#    Checksums find what changed after they were computed, and nothing else. What writes them,
#    storage/checkpoint_files.py::Writer, refuses to save weights that are not finite, so the good
#    checkpoints before it stay; and train_step skips an update whose loss or gradient norm is not
#    finite.

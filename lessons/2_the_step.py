"""Lesson 2. The step."""

# %% [markdown]
# # Lesson 2. The step
#
# One training step, taken apart: the loss without all the logits, AdamW by hand, the
# learning rate, clipping, microbatches, and the reason why weights stay in fp32. Then you
# put the parts together, and they make the same five updates as fsdp_train.py. At the end
# five training runs have a bug each, and you find it from the curve.
#
# Plan an hour. The textbook is loss.py, optim.py, and fsdp_train.py::train_step. You need
# the chain rule, and lesson 1 or some other acquaintance with a transformer.

# %%
import sys

sys.path += [".", ".."]  # the project: an editor may start cells in the file's folder
SHORT = "--short" in sys.argv  # fewer and smaller runs, for a first look and for the tests

import math

import torch
from matplotlib.figure import Figure

import data
import fsdp_train
import loss
import model as mpt
import optim
import processes
import program
from config import TrainConfig
from lessons import pictures, planted
from lessons.answers import measured

# %% [markdown]
# ## The loss of a token, and its gradient
#
#     logits = x W^T                        (N, V) for N tokens and V vocabulary entries
#     log_z  = logsumexp(logits)            (N,)
#     loss   = sum over tokens of  log_z - logits[label]
#
# The gradient of the logits needs no autograd. It is known as soon as they are:
#
#     d loss / d logits = softmax(logits) - onehot(label)
#
# A label of -100 does not count: that token's row of the gradient is 0.

# %%
torch.manual_seed(0)
N, V, D = 4, 6, 3
x = torch.randn(N, D, dtype=torch.float64)
weight = torch.randn(V, D, dtype=torch.float64)
labels = torch.tensor([2, 0, loss.IGNORE, 5])
counted = (labels != loss.IGNORE)[:, None]  # (N, 1)

logits = (x @ weight.T).requires_grad_()
by_torch = torch.nn.functional.cross_entropy(
    logits, labels, ignore_index=loss.IGNORE, reduction="sum"
)
(grad_by_torch,) = torch.autograd.grad(by_torch, logits)

index = labels.clamp(min=0)[:, None]  # a label that does not count must still be an index
log_z = logits.logsumexp(-1, keepdim=True)  # (N, 1)
by_hand = ((log_z - logits.gather(1, index)) * counted).sum()
one_hot = torch.zeros(N, V, dtype=torch.float64).scatter_(1, index, 1)
grad_by_hand = (logits.softmax(-1) - one_hot) * counted

print(f"loss: torch {by_torch.item():.6f}, by hand {by_hand.item():.6f} nats, 3 of 4 tokens count")
print("gradient of the logits, a row for each token:")
print(grad_by_hand.detach().numpy().round(2))
assert torch.allclose(by_torch, by_hand) and torch.allclose(grad_by_torch, grad_by_hand)

# %% [markdown]
# Each row sums to 0: what the label gains, the other entries lose.
#
# ## Without holding all logits
#
# The recipe of MPT-7B has V = 50,368 entries. A microbatch of 8 rows of 2,048 tokens has
# N = 16,384: in fp32 the logits take 16,384 * 50,368 * 4 bytes = 3.3 GB. Autograd keeps
# them until the backward pass, and makes more tensors of their size.
#
# But the gradient is known at once. So loss.py takes a chunk of tokens, computes their
# logits, turns those into their gradient, multiplies
#
#     gradient of x (rows of the chunk) = grad W        gradient of W += grad^T x
#
# and frees them before the next chunk. The backward pass only scales what is there already
# (loss.py::LinearCrossEntropy). The bytes below are measured, not computed: torch's
# profiler reports what the allocator gives out.

# %%
N, V, D = 1024, 8192, 64
x = torch.randn(N, D)
weight = torch.randn(V, D) / 8
labels = torch.randint(V, (N,))


def loss_and_gradients(loss_function, **keywords):
    """[loss, gradient of x, gradient of W], with the loss computed by this function."""
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    total = loss_function(*leaves, labels, **keywords)
    return [total.detach(), *torch.autograd.grad(total, leaves)]


of_logits = 4 * N * V
exact, all_at_once = measured(loss_and_gradients, loss.reference_linear_cross_entropy)
held = {"the logits": of_logits, "all at once": all_at_once}
for rows in (1024, 256, 64):
    in_chunks = loss.linear_cross_entropy
    result, held[f"chunks of {rows} rows"] = measured(loss_and_gradients, in_chunks, rows=rows)
    for got, expected in zip(result, exact, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)
anyway = held["x, W, gradients"] = 2 * 4 * (x.numel() + weight.numel())
in_megabytes = [(name, f"{n_bytes / 1e6:.1f} MB") for name, n_bytes in held.items()]
print(program.table((f"N = {N}, V = {V}", "at the peak"), in_megabytes))
in_chunks = held["chunks of 64 rows"]
assert anyway > in_chunks / 2
assert all_at_once > 2 * of_logits and in_chunks < of_logits / 2

# %% [markdown]
# Loss and gradients are the same. With small chunks most of what is left is x, W and their
# gradients (last line), which would be there anyway. loss.py takes chunks of 64 MiB of
# logits on a CPU, and at least 4,096 rows on a GPU, where small matrix products leave it
# idle.
#
# ## AdamW in a few lines
#
# Step t = 1, 2, ... with gradient g, learning rate r and peak learning rate lr:
#
#     p *= 1 - (r / lr) * decay                 decay of the weights, apart from the gradient
#     m += (1 - beta1) * (g - m)                running mean of the gradient
#     v += (1 - beta2) * (g^2 - v)              running mean of its square
#     p -= r * m^ / (sqrt(v^) + eps)            m^ = m / (1 - beta1^t), v^ = v / (1 - beta2^t)
#
# m and v begin at 0, so at first they are too small; m^ and v^ correct that. With fp32
# weights this is 4 bytes each for p, g, m and v: 16 bytes for each parameter.


# %%
@torch.no_grad()
def adamw(p, g, m, v, t, rate, decay, betas=(0.9, 0.95), eps=1e-8):
    """Step t = 1, 2, ... of AdamW. Changes p, m and v; decay is that of this step."""
    p *= 1 - decay
    m += (1 - betas[0]) * (g - m)
    v += (1 - betas[1]) * (g * g - v)
    m_hat = m / (1 - betas[0] ** t)
    v_hat = v / (1 - betas[1] ** t)
    p -= rate * m_hat / (v_hat.sqrt() + eps)


cfg = TrainConfig(lr=1e-2, decoupled_weight_decay=1e-3)
mine = torch.randn(1000)
theirs = torch.nn.Parameter(mine.clone())
optimizer = optim.build_optimizer([("w", theirs)], cfg)  # torch.optim.AdamW, the fused kernel
m, v = torch.zeros(1000), torch.zeros(1000)
for t in range(1, 51):
    g = torch.randn(1000)
    rate = cfg.lr * (1 - t / 100)  # any schedule
    adamw(mine, g, m, v, t, rate, decay=cfg.decoupled_weight_decay * rate / cfg.lr)
    theirs.grad = g
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
apart = (mine - theirs).abs().max().item()
print(f"50 steps by hand and by optim.py: at most {apart:.1e} apart")
assert apart < 1e-5

# %% [markdown]
# ## Why the decay is apart from the gradient
#
# The old way, L2 regularization, adds decay * p to the gradient. Adam then divides it by
# sqrt(v), so how far a weight decays depends on its gradients. Two weights start at 1. Their
# gradients are pure noise, a thousand times larger for one. Only the decay should move them,
# to (1 - 0.001)^200 = 0.82. L2's decay, 0.02, is chosen so that the small one decays about
# as far: then the large one does not decay at all.

# %%
n, steps, rate, decay = 4000, 200, 1e-3, 1e-3
ends = {}
for way in ("apart from the gradient", "in the gradient (L2)"):
    p = torch.ones(2, n)  # n copies of each of the two, to average over the noise
    m, v = torch.zeros(2, n), torch.zeros(2, n)
    noise = torch.Generator().manual_seed(0)
    for t in range(1, steps + 1):
        g = torch.randn(2, n, generator=noise) * torch.tensor([[0.01], [10.0]])
        if way == "apart from the gradient":
            adamw(p, g, m, v, t, rate, decay)
        else:
            adamw(p, g + 0.02 * p, m, v, t, rate, 0)
    ends[way] = p.mean(1).tolist()
    print(f"{way:24} small gradients {ends[way][0]:.2f}, large gradients {ends[way][1]:.2f}")
expected = (1 - decay) ** steps
assert all(abs(end - expected) < 0.01 for end in ends["apart from the gradient"])
small, large = ends["in the gradient (L2)"]
assert abs(small - expected) < 0.02 and abs(large - 1) < 0.01

# %% [markdown]
# Beware of the name. PyTorch's AdamW decays by rate * weight_decay. MPT's recipes mean
# (rate / lr) * decoupled_weight_decay, whose size does not depend on the peak rate lr. So
# optim.py gives PyTorch weight_decay = decoupled_weight_decay / lr.
#
# ## Warmup
#
# In step 1, m^ = g and v^ = g^2: the update is r * g / |g|. Every weight moves by the full
# learning rate, whatever its gradient is, on the evidence of one batch. Later, where
# gradients are mostly noise, m^ averages about ten of them while sqrt(v^) stays at their
# size.

# %%
p, m, v = torch.zeros(3, 100_000)
before = torch.zeros_like(p)
sizes = {}
for t in range(1, 101):
    before.copy_(p)
    adamw(p, torch.randn(len(p)), m, v, t, rate=1.0, decay=0)
    sizes[t] = (p - before).square().mean().sqrt().item()
for t in (1, 2, 5, 10, 100):
    print(f"step {t:3}: root mean square of the update {sizes[t]:.2f} learning rates")
assert abs(sizes[1] - 1) < 1e-3 and 0.2 < sizes[100] < 0.3

# %% [markdown]
# So the first steps are the largest when they should be the smallest. Warmup raises the
# rate from 0 meanwhile; then a cosine lowers it. The schedule counts steps from 0: step s is
# AdamW's t = s + 1. With w steps of warmup, and a share alpha of the rate left at step `end`:
#
#     s < w:   s / w                            step 0 has rate 0: it changes nothing
#     else:    alpha + (1 - alpha) * (1 + cos(pi * (s - w) / (end - w))) / 2
#
# optim.py computes this from the step alone. It remembers nothing, so a resumed run cannot
# be out of step, and nothing has to be called once for each update.


# %%
def factor(step, cfg):
    """The share of the peak learning rate at step 0, 1, 2, ..."""
    if step < cfg.warmup_steps:
        return step / cfg.warmup_steps
    progress = (step - cfg.warmup_steps) / (cfg.max_steps - cfg.warmup_steps)
    return cfg.alpha_f + (1 - cfg.alpha_f) * (1 + math.cos(math.pi * progress)) / 2


cfg = TrainConfig(lr=6e-4, warmup_steps=100, max_steps=4800, alpha_f=0.1)  # MPT-125M's recipe
for step in (0, 50, 100, 1200, 2400, 3600, 4800):
    rate = cfg.lr * factor(step, cfg)
    print(f"step {step:4}  {rate:.2e}  {'#' * round(60 * factor(step, cfg))}")
    assert math.isclose(rate, optim.learning_rate(step, cfg))

# %% [markdown]
# ## Clipping
#
#     norm = sqrt(sum of the squares of all gradients)
#     g   *= min(1, max_norm / norm)
#
# One factor for all gradients, so their direction stays. Adam does not care about a
# constant factor; what clipping stops are single outliers. Below, the gradient of step 51 of
# 100 is a hundred times too large. The usual norm is about 32, so clip at 35.

# %%
torch.manual_seed(0)
gradients = torch.randn(100, 1000)  # 100 steps, 1000 weights
gradients[50] *= 100
updates = {}
for max_norm in (0, 35):  # 0: do not clip
    p = torch.nn.Parameter(torch.zeros(1000))
    m, v = torch.zeros(1000), torch.zeros(1000)
    positions = [p.detach().clone()]
    for t, g in enumerate(gradients, 1):
        p.grad = g.clone()
        optim.clip_gradients([p], p.grad.norm(), max_norm)
        adamw(p, p.grad, m, v, t, rate=1.0, decay=0)
        positions.append(p.detach().clone())
    updates[max_norm] = torch.stack(positions).diff(dim=0)  # (100, 1000)

cells, late = [], {}
for max_norm, update in updates.items():
    parts = [update[a:b].square().mean().sqrt().item() for a, b in ((40, 50), (50, 60), (70, 80))]
    name = f"clipped at {max_norm}" if max_norm else "not clipped"
    cells.append((name, *(f"{part:.2f}" for part in parts)))
    late[max_norm] = parts[-1]
print("root mean square of the update, in learning rates")
print(program.table(("", "steps 41-50", "51-60", "71-80"), cells))
direction = gradients[50] / gradients[50].norm()
moves = {name: -(update[50:70] @ direction).sum().item() for name, update in updates.items()}
print("way in the outlier's direction in 20 steps, in learning rates")
print(f"{moves[0]:.0f} not clipped, {moves[35]:.0f} clipped")
assert moves[0] > 3 * abs(moves[35])
assert late[35] > 2 * late[0]

# %% [markdown]
# Without clipping, m carries the outlier on for ten steps. Then v remembers it for much
# longer than m does: in steps 71-80 the run moves less than half as far. With several
# devices the norm needs all shards (parallel.py::grad_norm); a norm on each rank would clip
# each shard by another factor.
#
# ## Microbatches
#
# A batch that does not fit is cut into microbatches, whose gradients add up in .grad. The
# loss of a step is
#
#     sum of the losses of the tokens that count / their number in the whole global batch
#
# So train_step counts the tokens first, before the first backward pass divides by that
# number. The short way, to average over each microbatch and then over the microbatches, is
# the same only if all have equally many tokens that count. Below, in four of the eight rows
# only the last 4 to 32 tokens count, as if those were prompts with short answers.

# %%
text = planted.Text()
net = mpt.MPT(planted.MODEL)
mpt.init_weights(net, seed=0)
ids, labels = data.inputs_and_labels(text.code[:8])  # (8, 63) each
labels = labels.clone()
for row, answer in ((3, 32), (5, 16), (6, 8), (7, 4)):
    labels[row, :-answer] = loss.IGNORE


def gradient(size, average):
    """All gradients as one vector, with microbatches of `size` rows."""
    n_tokens = (labels != loss.IGNORE).sum()
    parts = list(zip(ids.split(size), labels.split(size), strict=True))
    for part_ids, part_labels in parts:
        divisor = n_tokens
        if average:
            divisor = (part_labels != loss.IGNORE).sum() * len(parts)
        (net(part_ids, labels=part_labels) / divisor).backward()
    vector = torch.cat([p.grad.flatten() for p in net.parameters()])
    net.zero_grad()
    return vector


whole = gradient(8, average=False)
cells = []
for size in (8, 4, 2, 1):
    apart = [((gradient(size, way) - whole).norm() / whole.norm()).item() for way in (False, True)]
    cells.append((size, *(f"{x:.1e}" for x in apart)))
    assert apart[0] < 1e-5
    assert size == 8 or apart[1] > 0.05
print("distance from the gradient of the whole batch, relative to its norm")
print(program.table(("rows of a microbatch", "sum / all tokens", "mean of means"), cells))

# %% [markdown]
# Right is what does not depend on the microbatch size, which is a matter of memory and not
# of the model. The mean of means gives each token of a short answer more weight than it
# gives to others. The same holds between data-parallel ranks: n_tokens counts those of all
# of them.
#
# ## Why the weights stay in fp32
#
# Matrix products in bf16 lose little. Weights in bf16 are another matter. bf16 has 8
# significant bits: from one number to the next it is 1/256 to 1/128 of the number. An
# update of less than half of that is rounded away, and the next one, too.

# %%
total = {torch.float32: torch.tensor(1.0), torch.bfloat16: torch.tensor(1.0).bfloat16()}
for _ in range(1000):
    for dtype in total:
        total[dtype] -= 0.001
for dtype, value in total.items():
    print(f"1 - 1000 * 0.001 in {str(dtype):15} = {value.item():.4f}")
assert total[torch.bfloat16] == 1 and abs(total[torch.float32]) < 1e-4

# %% [markdown]
# Now a real run: a small MPT on bytes of Python's standard library (lessons/planted.py),
# with AdamW, clipping, warmup and cosine. One run keeps its weights in fp32. The other
# rounds them to bf16 after each step, and nothing else differs: all computing is in fp32.
#
# What counts is the size of the updates relative to that of the weights. So the peak
# learning rate is chosen such that this ratio is about that of MPT-7B, where the rate is
# 1.2e-4 and most weights begin with a standard deviation of sqrt(2 / 4096).

# %%
torch.set_num_threads(1)  # the matrices are small: more threads would wait for each other
steps = 60 if SHORT else planted.STEPS
lr = 8e-4
masters = planted.train(text, steps=steps, lr=lr)
rounded = planted.train(text, steps=steps, lr=lr, dtype=torch.bfloat16)
print(f"peak rate / size of the weights: {lr / masters.weight[0]:.4f} here")
print(f"                                 {1.2e-4 / math.sqrt(2 / 4096):.4f} in MPT-7B")


def mean(values):
    """The mean of a list of numbers."""
    return sum(values) / len(values)


print("share of the weights that a step changes, in each fifth of the run")
fifths = range(0, steps, steps // 5)
for name, run in {"fp32": masters, "bf16": rounded}.items():
    shares = " ".join(f"{mean(run.moved[a : a + steps // 5]):6.1%}" for a in fifths)
    print(f"{name}  {shares}   validation loss on code at the end {run.code:.2f} nats")
assert mean(rounded.moved[-steps // 5 :]) < 0.5 * mean(masters.moved[-steps // 5 :])
assert rounded.code > masters.code + 0.05

# %% [markdown]
# Therefore the optimizer has fp32 masters, and bf16 copies go into the matrix products:
# autocast makes them (parallel.py::autocast), or fully_shard when it gathers the weights.
# The copies feel the small updates as soon as these have added up in the masters.
#
# ## The whole step
#
# Open fsdp_train.py::train_step beside this cell. Here is the same with the parts from
# above. On many devices the real one also sums over the ranks, and it skips the update if
# loss or norm is not finite. Both train the same model on the same rows, 3 rows in a
# microbatch. ~id (-id - 1) marks an id that is read but not predicted
# (data.py::inputs_and_labels).


# %%
def step_by_hand(model, state, rows, step, cfg):
    """One update. state: {parameter: (m, v)}. Returns (loss, gradient norm)."""
    ids, labels = data.inputs_and_labels(rows)
    n_tokens = (labels != loss.IGNORE).sum()
    total = 0.0
    size = cfg.microbatch_size
    for part_ids, part_labels in zip(ids.split(size), labels.split(size), strict=True):
        part = model(part_ids, labels=part_labels) / n_tokens
        part.backward()
        total += part.item()

    norm = math.sqrt(sum(p.grad.square().sum().item() for p in state))
    scale = min(1.0, cfg.grad_clip / (norm + 1e-6))
    share = factor(step, cfg)
    for p, (m, v) in state.items():
        decay = share * cfg.decoupled_weight_decay
        adamw(p, p.grad * scale, m, v, step + 1, share * cfg.lr, decay)
        p.grad = None
    return total, norm


cfg = TrainConfig(
    lr=2e-3, warmup_steps=2, max_steps=5, decoupled_weight_decay=0.01, microbatch_size=3
)
world = processes.World(0, 1, 0, 1, torch.device("cpu"))  # one process alone
models = [mpt.MPT(planted.MODEL) for _ in range(2)]
for model in models:
    mpt.init_weights(model, seed=0)
hand, real = models
state = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in hand.parameters()}
optimizer = optim.build_optimizer(real.named_parameters(), cfg)

cells = []
for step in range(cfg.max_steps):
    rows = text.code[8 * step : 8 * step + 8].clone()  # (8, 64)
    rows[5:, :30] = ~rows[5:, :30]
    mine = step_by_hand(hand, state, rows, step, cfg)
    value, norm, _ = fsdp_train.train_step(real, optimizer, rows, step, cfg, world, "fp32")
    cells.append((step, *(f"{x:.5f}" for x in (mine[0], value, mine[1], norm))))
    assert math.isclose(mine[0], value.item(), abs_tol=1e-4)
    assert math.isclose(mine[1], norm.item(), rel_tol=1e-3)
print(program.table(("step", "loss by hand", "train_step", "norm by hand", "train_step"), cells))
pairs = zip(hand.parameters(), real.parameters(), strict=True)
apart = max((a - b).abs().max().item() for a, b in pairs)
print(f"after 5 updates the weights are at most {apart:.1e} apart")
assert apart < 1e-4

# %% [markdown]
# ## Five bugs
#
# The loop of lessons/planted.py again, with fp32 weights and a peak learning rate of 6e-3:
# one run without a bug, and five with a bug each, on the same data from the same initial
# weights. Each cause in the list below occurs once.
#
# A step has four microbatches: one of code with about 500 tokens, and three of two import
# lines each, which together have about 150. Then gradients are clipped to a norm of 1, in
# place. "Logged" is what the loop itself believes, with its bug, over the last tenth of the
# run. The validation is separate code without the bug, on text that no run has seen.

# %%
for cause, meaning in planted.CAUSES.items():
    print(f'"{cause}": {meaning}')
good = planted.train(text, steps=steps)
runs = {letter: planted.train(text, cause, steps) for letter, cause in planted.letters().items()}
print(f"\n{planted.LEGEND}", planted.table({"no bug": good} | runs), sep="\n")

# %%
figure = Figure(figsize=(15, 5.6))
axes = figure.subplots(2, 5, sharex=True, sharey="row")
for column, (letter, run) in enumerate(runs.items()):
    above, below = axes[:, column]
    above.plot(good.loss, color="0.65", linewidth=2.5, label="no bug")
    above.plot(run.loss, color="black", linewidth=1, label=letter)
    below.plot(good.grad_norm, color="0.65", linewidth=2.5)
    below.plot(run.grad_norm, color="black", linewidth=1)
    above.set_title(letter, fontweight="bold")
    above.legend()
    below.set(xlabel="step", yscale="log")
axes[0, 0].set(ylabel="logged loss, nats per token", ylim=(0, 6.5))
axes[1, 0].set(ylabel="gradient norm before clipping")
figure.suptitle("Five training runs with a bug each, beside the run without")
figure.tight_layout()
pictures.save(figure, "2-mysteries")

# %% [markdown]
# Think about each bug before you look for it: what would it do to the loss, to the norm, to
# the weights, to the validation? Which bug could make a loss far too low? Some leave a
# curve that looks almost healthy: for these read the norms and the table. The loop is
# planted.py::train.
#
# ## The exercise
#
# `python -m lessons check 2` puts lessons/mine/2_the_step.py there for you. Write in it
# chunked_cross_entropy, the loss and its gradients in chunks, and the BUGS, the cause of each
# letter. The checker measures the bytes that your tensors hold. Start with a single chunk;
# then cut.
#
# ## Three questions
#
# 1. Adam divides by sqrt(v), so multiplying the loss by 1000 should change nothing. Which
#    two parts of the step notice it all the same?
# 2. loss.py computes gradients in its forward pass, before anyone knows what the loss will
#    be multiplied by. Why may it do that, and for which uses of the loss would it be wrong?
# 3. Could weights be kept in bf16 if each update were rounded up or down at random, with
#    probabilities such that the result is right on average?
#
# `python -m lessons 2 --answers` has the answers.
#
# ## What to read next
#
# - Kingma, Ba, Adam: A Method for Stochastic Optimization, 2014 (arXiv 1412.6980)
# - Loshchilov, Hutter, Decoupled Weight Decay Regularization, 2017 (arXiv 1711.05101)
# - Pascanu, Mikolov, Bengio, On the difficulty of training Recurrent Neural Networks, 2012
#   (arXiv 1211.5063): clipping by the norm
# - Micikevicius et al., Mixed Precision Training, 2017 (arXiv 1710.03740): fp32 masters
# - Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024 (arXiv
#   2411.09009): the loss of this lesson as GPU kernels
#
# In the project: loss.py, optim.py, then fsdp_train.py from train_step down.

# Scroll on for the answers.

# %% [markdown]
# ## Answers
#
# 1. Clipping: max_norm is a fixed number, so a gradient a thousand times larger is always
#    clipped, and each step has the same norm whatever its batch says. And eps: it matters
#    where sqrt(v) is not much larger than 1e-8, and a larger loss makes it matter less. (So
#    would a z-loss, or any other term that is not multiplied.)
# 2. The loss is one number, and what follows is a function of it. By the chain rule, its
#    gradients are those of the loss times one factor. The backward pass multiplies by it,
#    here by 1 / tokens. It would be wrong if tokens had different factors, which become
#    known only later: then the factors must go in before the sum. Nor can it be
#    differentiated twice.
# 3. Yes, it is called stochastic rounding. An update of a tenth of a step between two
#    numbers then moves the weight by a whole step one time in ten. On average nothing is
#    lost, but each update has noise of its own, and it needs random numbers for each
#    weight. Some accelerators have it in hardware.

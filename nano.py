"""The whole trainer on one page: a small MPT learns Python's standard library.

    python data.py configs/demo.py        once: the text as tokens, in data/stdlib-bpe-4096
    python nano.py                        on one device
    torchrun --nproc_per_node 2 nano.py   on two: each has all weights and half of each batch

A test holds its losses to those of `fsdp_train.py configs/demo.py`. The other files add larger
models, runs that survive, your own text, speed (READING.md). For an idea, change this file.
"""

import glob
import hashlib
import json
import math
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

# --- Settings: those of configs/demo.py

d_model, n_heads, n_layers = 256, 8, 4  # n_heads: a power of two, for ALiBi's slopes
seq_len, vocab_size = 128, 4096
batch_size = 8  # rows of a step, over all ranks
max_steps, warmup_steps = 700, 50
peak_lr, last_lr = 2e-3, 2e-4
seed = 1337
data_dir = "data/stdlib-bpe-4096"
show_every = 50  # steps

device = "cuda" if torch.cuda.is_available() else "cpu"  # cuda is ROCm, too
rank = int(os.environ.get("RANK", 0))  # torchrun sets these
n_ranks = int(os.environ.get("WORLD_SIZE", 1))


# --- The model. B rows, T tokens, H heads of width D


class Attention(nn.Module):
    """softmax(q k^T / sqrt(D) + bias) v, in each head."""

    def __init__(self):
        super().__init__()
        self.Wqkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):  # (B, T, d_model) -> the same shape
        B, T, _ = x.shape
        q, k, v = self.Wqkv(x).view(B, T, 3, n_heads, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=alibi_bias(T, x.device).to(q.dtype))
        return self.out_proj(y.transpose(1, 2).flatten(2))  # heads side by side


def alibi_bias(T, device):
    """-slope * (i - j) for query i and key j, -infinity for keys of the future: (H, T, T)."""
    i = torch.arange(T, device=device)
    distance = i[:, None] - i  # (T, T), negative in the future
    slopes = 2.0 ** (-8 * torch.arange(1, n_heads + 1, device=device) / n_heads)
    return (-slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf)


class FFN(nn.Module):
    """The feed-forward network, the same for each token."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down_proj = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x):  # (B, T, d_model) -> the same shape
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(d_model, bias=False)
        self.attn = Attention()
        self.norm_2 = nn.LayerNorm(d_model, bias=False)
        self.ffn = FFN()

    def forward(self, x):  # (B, T, d_model) -> the same shape
        x = x + self.attn(self.norm_1(x))
        return x + self.ffn(self.norm_2(x))


class MPT(nn.Module):
    """Embedding, blocks, a last norm. The output layer is the embedding again."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layers))
        self.norm_f = nn.LayerNorm(d_model, bias=False)
        for name, weight in self.named_parameters():
            weight.data = initial_weight(f"transformer.{name}", weight.shape)

    def forward(self, ids):  # (B, T) -> logits (B, T, vocab_size)
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm_f(x) @ self.wte.weight.T


def initial_weight(name, shape):
    """Norms are 1, the rest N(0, 2 / number of columns), smaller where it enters the stream."""
    if len(shape) == 1:
        return torch.ones(shape)
    std = math.sqrt(2 / shape[1])
    if "out_proj" in name or "down_proj" in name:
        std /= math.sqrt(2 * n_layers)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0, std, generator=generator)


# --- The data: which rows a step reads depends on the seed and on the step alone


def load(split):
    """The rows of a split, (n, seq_len + 1) ids. The last id of a row is the first of the next."""
    paths = sorted(glob.glob(f"{data_dir}/{split}-*.bin"))
    if not paths:
        sys.exit(f"no {split} tokens in {data_dir}: python data.py configs/demo.py makes them")
    rows = []
    for path in paths:
        header = json.loads(np.fromfile(path, "S4096", 1)[0])
        ids = np.memmap(path, header["dtype"], "r", offset=4096)
        rows.append(np.lib.stride_tricks.sliding_window_view(ids, seq_len + 1)[::seq_len])
    return np.concatenate(rows)


def shuffled(position, n, epoch):
    """Where a random permutation of 0 ... n - 1 sends a position (a Feistel network)."""
    bits = max(1, ((n - 1).bit_length() + 1) // 2)  # of each half of the number
    mask = 2**bits - 1
    texts = f"{seed}:{epoch}", f"{epoch}:{seed}"
    digests = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    left, right = position >> bits, position & mask
    for key in np.frombuffer(digests, "<u8")[:6].tolist():
        left, right = right, left ^ (hashed((right + key) % 2**64) & mask)
    position = left << bits | right
    return position if position < n else shuffled(position, n, epoch)


def hashed(x):
    """Another number of 64 bits, as good as random: SplitMix64's finalizer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def batch(rows, step):
    """This rank's rows of a step: ids and labels, (batch_size / n_ranks, seq_len) each."""
    per_rank = batch_size // n_ranks
    first = step * batch_size + rank * per_rank  # counted from the start of the run
    places = [divmod(sample, len(rows)) for sample in range(first, first + per_rank)]
    chosen = [rows[shuffled(position, len(rows), epoch)] for epoch, position in places]
    return inputs_and_labels(np.stack(chosen))


def inputs_and_labels(rows):
    """Rows (B, T + 1) -> ids (B, T), and the id that follows each of them (B, T)."""
    ids = torch.from_numpy(rows.astype(np.int64)).to(device)
    return ids[:, :-1], ids[:, 1:]


# --- Training


def loss_of(model, ids, labels):
    """The mean cross-entropy, nats per token. On a GPU the matrices are multiplied in bf16."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(ids)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def learning_rate(step):
    """Up in a line, then down half a cosine."""
    if step < warmup_steps:
        return peak_lr * step / warmup_steps
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    return last_lr + (peak_lr - last_lr) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def validate(model, rows):
    """The loss on text that is not trained on."""
    parts = np.array_split(rows, math.ceil(len(rows) / 64))
    return sum(loss_of(model, *inputs_and_labels(p)).item() * len(p) for p in parts) / len(rows)


@torch.no_grad()
def generate(model, ids, n_tokens):
    """The text of ids (1, T) and of n_tokens more, drawn from the model's probabilities."""
    for _ in range(n_tokens):
        probabilities = model(ids[:, -seq_len:])[:, -1].softmax(dim=-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
    with open(f"{data_dir}/tokenizer.json") as file:
        tokens = json.load(file)["tokens"] + ["\n"]  # bytes as characters; "\n": a document's end
    return "".join(tokens[i] for i in ids[0]).encode("latin-1").decode(errors="replace")


def main():
    """Train, print the losses, and let the model write."""
    assert batch_size % n_ranks == 0, f"{n_ranks} ranks cannot share {batch_size} rows"
    if n_ranks > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    train, val = load("train"), load("val")
    model = MPT().to(device)
    # DDP: after each backward the gradients become the mean of those of all ranks.
    step_model = nn.parallel.DistributedDataParallel(model) if n_ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
    begin = time.time()
    for step in range(max_steps):
        loss = loss_of(step_model, *batch(train, step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % show_every == 0:
            loss = loss.detach() / n_ranks
            if n_ranks > 1:
                dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step + 1}  loss {loss:.6f}  {time.time() - begin:.0f} s")
    if rank == 0:
        print(f"validation loss {validate(model, val):.4f} nats per token")
        start = torch.from_numpy(val[:1, :16].astype(np.int64)).to(device)
        print(generate(model, start, 100))
    if n_ranks > 1:
        dist.barrier()  # until rank 0 has validated
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(f"{__doc__}\nIt takes no flags: change the settings in the file.")
    main()

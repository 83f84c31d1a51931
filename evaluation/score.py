"""Log-probabilities of continuations: shared-prefix scoring, in batches, on all ranks.

    log p(continuation | context) = sum over its tokens of log p(token | all tokens before it)

The choices of a question begin with the same tokens, often beyond the question itself. Such a group of requests reads
its beginning in one pass, which scores what of it belongs to continuations and leaves its keys and values in a cache;
a second pass goes on from there with the rest of each request. A batch holds groups of similar lengths: beginnings
are padded on the left, so that they end together, and rests on the right, where a causal model does not see it.

    tokens read, padding included    one request at a time    in groups and batches    GPT-2's ids, no examples
    ARC-Challenge                                  169,433                   82,466
    PIQA                                           129,989                  128,211    padding takes what is shared
    Winograd                                        10,533                    8,017

Rank r takes every n-th batch, and all ranks make equally many passes, as a sharded model needs. Run
`python -m evaluation.score` to see the answers of a question grouped. Read next: evaluation/zero_shot.py.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import parallel
import processes
from config import MPTConfig, arguments, run
from loss import IGNORE
from model import MPT, KVCache, init_weights


@dataclass
class Request:
    """Token ids, (n,) int64, of which the last `count` are scored."""

    ids: np.ndarray
    count: int

    @property
    def key(self) -> str:
        return hashlib.blake2b(
            self.ids.tobytes() + bytes(str(self.count), "ascii"), digest_size=12
        ).hexdigest()


class Group(NamedTuple):
    """Requests, by their numbers, whose first `shared` ids are equal. A request alone has shared = 0."""

    numbers: list[int]
    shared: int = 0


def score(model, requests, world, precision, batch_tokens, part=None, title="") -> torch.Tensor:
    """(n, 2) float64 on every rank: sum of the log-probabilities, and 1 where each token was the likeliest.

    A collective. batch_tokens: of a batch of a rank, if each of its requests were as long as the longest (one group may
    have more); part: see zero_shot.Part; title: of the progress bar, empty for none.
    """
    found = torch.zeros(len(requests), 2, dtype=torch.float64)
    known = part.known if part else {}
    keys = [request.key for request in requests] if part else []
    open_ = [i for i in range(len(requests)) if not (part and keys[i] in known)]
    groups = grouped(open_, requests, batch_tokens)
    with tqdm(
        desc=title, total=len(open_), unit=" requests", disable=not title or world.global_rank > 0
    ) as bar:
        for kind in (
            [g for g in groups if g.shared],
            [g for g in groups if not g.shared],
        ):  # two passes, or one
            batches = batched(kind, requests, batch_tokens, model.cfg.max_seq_len)
            for turn in range(math.ceil(len(batches) / world.dp_size)):
                mine = turn * world.dp_size + world.dp_rank
                batch = batches[
                    min(mine, len(batches) - 1)
                ]  # a rank without work does the last batch as well
                values = forward(model, batch, requests, world.device, precision)
                numbers = [i for group in batch for i in group.numbers]
                if mine < len(batches):
                    found[numbers] = values
                    if part:
                        part.add([keys[i] for i in numbers], values.tolist())
                done = batches[turn * world.dp_size : (turn + 1) * world.dp_size]
                bar.update(sum(len(group.numbers) for batch in done for group in batch))
    processes.dp_sum(found, world)
    for i in set(range(len(requests))) - set(open_):
        found[i] = torch.tensor(known[keys[i]])
    return found


def grouped(numbers, requests, batch_tokens: int) -> list[Group]:
    """Each request in one group. In the order of their ids neighbours have most in common: a request joins the group
    before it where that saves tokens. The last id of a request is not shared: something must be left to go on with."""
    groups, tokens, longest = (
        [],
        0,
        0,
    )  # of the last group: its requests' ids, all of them and the most that one has
    for i in sorted(numbers, key=lambda i: requests[i].ids.astype(">u4").tobytes()):
        ids = requests[i].ids
        if groups:
            last, n = groups[-1], len(groups[-1].numbers) + 1
            shared = common(requests[last.numbers[0]].ids[: last.shared or -1], ids[:-1])
            fits = n * (max(longest, len(ids)) - 1) <= batch_tokens
            if (
                fits
                and shared > 1
                and saved(n, shared, tokens + len(ids)) > saved(n - 1, last.shared, tokens)
            ):
                last.numbers.append(i)
                groups[-1] = Group(last.numbers, shared)
                tokens, longest = tokens + len(ids), max(longest, len(ids))
                continue
        groups.append(Group([i]))
        tokens = longest = len(ids)
    return groups


def common(a, b) -> int:
    """How many ids two sequences have in common at their beginning."""
    n = min(len(a), len(b))
    return int(np.argmin(np.append(a[:n] == b[:n], False)))


def saved(n: int, shared: int, tokens: int) -> int:
    """What n requests of `tokens` ids in all save by reading `shared` of them once: the ids that are not read again,
    less those of the second pass, since it costs something too. One request alone saves nothing."""
    return (n - 1) * shared - (tokens - n * shared) if n > 1 else 0


class Size(NamedTuple):
    """Of a batch: groups, requests, their tokens, the longest beginning and the longest rest."""

    groups: int = 0
    rows: int = 0
    tokens: int = 0
    beginning: int = 0
    rest: int = 0

    def plus(self, shared: int, rests: list[int]):
        tokens = self.tokens + shared + sum(rests)
        longest = max(self.beginning, shared), max(self.rest, *rests)
        return Size(self.groups + 1, self.rows + len(rests), tokens, *longest)


def batched(groups, requests, batch_tokens: int, room: int) -> list[list[Group]]:
    """Batches of at most `batch_tokens`, a quarter of them padding at most, and `room` tokens wide."""
    rests = {
        group.numbers[0]: [len(requests[i].ids) - group.shared for i in group.numbers]
        for group in groups
    }
    batches, size = [], Size()
    for group in sorted(
        groups, key=lambda group: (group.shared // 8, max(rests[group.numbers[0]])), reverse=True
    ):
        new = group.shared, rests[group.numbers[0]]
        size = size.plus(*new)
        width = size.beginning + size.rest - 1
        read = size.groups * size.beginning + size.rows * size.rest  # padding too
        if (
            not batches
            or size.rows * width > batch_tokens
            or width > room
            or read > size.tokens * 4 / 3
        ):
            batches.append([])
            size = Size().plus(*new)
        batches[-1].append(group)
    return batches


@torch.no_grad()
def forward(model, batch: list[Group], requests, device, precision) -> torch.Tensor:
    """Scores of a batch's requests, group after group: (rows, 2) float64 on the CPU, as `score`."""
    rows = [requests[i] for group in batch for i in group.numbers]
    shared = [group.shared for group in batch for _ in group.numbers]
    rests = [
        row.ids[max(0, n - 1) :] for row, n in zip(rows, shared, strict=True)
    ]  # the last shared id, and the rest
    counts = [min(row.count, len(row.ids) - n) for row, n in zip(rows, shared, strict=True)]
    cache, before = None, []
    with parallel.autocast(device, precision):
        if batch[0].shared:
            dtype = torch.bfloat16 if precision == "bf16" else next(model.parameters()).dtype
            earlier = [row.count - n for row, n in zip(rows, counts, strict=True)]
            cache, *before = read_beginnings(
                model, batch, requests, earlier, max(map(len, rests)) - 1, device, dtype
            )
        ids, labels = padded(rests, counts, device)
        parts = [
            (*model(ids, labels=labels, cache=cache, score=True), labels != IGNORE)
        ]  # (rows, T) each
    log_probs, greedy, counted = (torch.cat(x, dim=1) for x in zip(*before, *parts, strict=True))
    sums = (log_probs.double() * counted).sum(dim=1)
    return torch.stack([sums, (greedy | ~counted).all(dim=1).double()], dim=1).cpu()


def padded(rows, counts, device, left=False) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels (B, T), padded on the right or on the left; of each row the last `count` ids are labels."""
    width = max(map(len, rows)) - 1
    ids, labels = (
        np.zeros((len(rows), width), np.int64),
        np.full((len(rows), width), IGNORE, np.int64),
    )
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        end = width if left else len(row) - 1
        ids[number, end - len(row) + 1 : end] = row[:-1]
        labels[number, end - count : end] = row[len(row) - count :]
    return torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)


def read_beginnings(
    model, batch: list[Group], requests, earlier: list[int], room: int, device, dtype
):
    """One pass over the shared ids of each group but the last. `earlier`: how many of them each request is scored by.

    Returns a cache, a row for each request and `room` for more ids, and the scores of these ids for each request:
    log-probabilities, whether they were the likeliest, whether they count, (rows, T) each.
    """
    beginnings = [requests[group.numbers[0]].ids[: group.shared] for group in batch]
    owners = [number for number, group in enumerate(batch) for _ in group.numbers]
    most = [
        max(n for owner, n in zip(owners, earlier, strict=True) if owner == g)
        for g in range(len(batch))
    ]
    ids, labels = padded(beginnings, most, device, left=True)
    width = ids.shape[1]
    pad = torch.tensor([width + 1 - len(beginning) for beginning in beginnings], device=device)
    cache = KVCache.empty(model.cfg, len(batch), width, device, dtype, pad)
    log_probs, greedy = model(ids, labels=labels, cache=cache, score=True)
    owners = torch.tensor(owners, device=device)
    counted = (
        torch.arange(width, device=device) >= width - torch.tensor(earlier, device=device)[:, None]
    )
    copies = KVCache.empty(model.cfg, len(owners), width + room, device, dtype, pad[owners])
    copies.k[:, :, :, :width], copies.v[:, :, :, :width] = cache.k[:, owners], cache.v[:, owners]
    copies.length = width
    return copies, (log_probs[owners], greedy[owners], counted)


def demonstrate(argv) -> None:
    """What is read of a question with four answers, and that an untrained model's scores do not change by it."""
    arguments(argv)
    cfg = MPTConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=256, max_seq_len=128, alibi=True)
    model, world = MPT(cfg).eval(), processes.World(0, 1, 0, 1, torch.device("cpu"))
    init_weights(model, seed=0)
    question, answers = (
        "Question: what does bread need?\nAnswer:",
        (" flour, water", " flour", " a lawn", " nails"),
    )
    texts = [
        np.frombuffer((question + answer).encode(), np.uint8).astype(np.int64) for answer in answers
    ]
    requests = [Request(ids, len(ids) - len(question)) for ids in texts]
    for group in grouped(range(4), requests, batch_tokens=8192):
        print(f"read once: {bytes(requests[group.numbers[0]].ids[: group.shared].tolist())!r}")
        print("then:", ", ".join(repr(answers[i]) for i in group.numbers))
    together = score(model, requests, world, "fp32", 8192)
    alone = torch.cat([score(model, [request], world, "fp32", 8192) for request in requests])
    print(f"sums of log-probabilities {together[:, 0].tolist()}")
    print(f"largest difference from one at a time: {(together - alone).abs().max().item():.1e}")
    assert torch.allclose(together, alone, atol=1e-4)


if __name__ == "__main__":
    run(demonstrate)

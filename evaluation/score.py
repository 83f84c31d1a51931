"""Log-probabilities of continuations: shared-prefix scoring, in batches, on all ranks.

    log p(continuation | context) = sum over its tokens of log p(token | all tokens before it)

The choices of one question begin with the same tokens: its prefix. The model reads a prefix once
and keeps the keys and values in a cache; a second pass reads the suffixes, one row for each choice.
Parts of a continuation may be shared, too: then the first pass scores them.

A batch holds groups of similar lengths. Prefixes are padded on the left, so that they end together.
Suffixes are padded on the right, where a causal model never looks.

    tokens read, padding included    one at a time    shared prefixes    (GPT-2's ids, zero-shot)
    ARC-Challenge                          169,433             82,466
    PIQA                                   129,989            128,211    padding costs what is saved
    Winograd                                10,533              8,017

Batches go to the data-parallel ranks in turn. All ranks make equally many passes, since a sharded
model needs all of them for each pass. The stages of a pipeline pass a batch on from the first to
the last, and each has the cache of its own layers.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import parallel
import processes
from loss import IGNORE


@dataclass
class Request:
    """Token ids (n,) int64, of which the last `count` are scored."""

    ids: np.ndarray
    count: int

    @property
    def key(self) -> str:
        """A hash of both fields: the name of this request in files of scores."""
        content = self.ids.tobytes() + str(self.count).encode("ascii")
        return hashlib.blake2b(content, digest_size=12).hexdigest()


class Group(NamedTuple):
    """Indices of requests whose first `shared` ids are equal; `shared` is 0 for one request."""

    indices: list[int]
    shared: int = 0


def score(model, requests, world, precision, batch_tokens, part=None, title="") -> torch.Tensor:
    """Score all requests. Returns (n, 2) float64 on every rank. A collective.

    Column 0: the sum of the log-probabilities. Column 1: 1 if each token was the likeliest, else 0.

    batch_tokens: the most tokens of a batch on one rank, with padding (one group may exceed it).
    part: scores of an interrupted evaluation, see results.Part. title: of the progress bar; empty
    for none.
    """
    keys = [request.key for request in requests] if part else []
    known_scores = part.known if part else {}
    missing = [i for i in range(len(requests)) if not part or keys[i] not in known_scores]
    scores = torch.zeros(len(requests), 2, dtype=torch.float64)

    hide_bar = not title or world.global_rank > 0
    bar = tqdm(desc=title, total=len(missing), unit=" requests", disable=hide_bar)
    with bar:
        for batches in all_batches(missing, requests, batch_tokens, model.cfg.max_seq_len):
            for first in range(0, len(batches), world.dp_size):
                turn = batches[first : first + world.dp_size]  # one for each data-parallel rank
                has_batch = world.dp_rank < len(turn)
                # A rank without a batch repeats the last one, and drops its scores.
                batch = turn[world.dp_rank] if has_batch else turn[-1]
                batch_scores = forward(model, batch, requests, world.device, precision)
                if has_batch:
                    indices = indices_of(batch)
                    scores[indices] = batch_scores
                    if part:
                        part.add([keys[i] for i in indices], batch_scores.tolist())
                bar.update(sum(len(indices_of(batch)) for batch in turn))

    processes.dp_sum(scores, world)
    for i in set(range(len(requests))) - set(missing):
        scores[i] = torch.tensor(known_scores[keys[i]])
    return scores


def indices_of(batch: list[Group]) -> list[int]:
    """The indices of a batch's requests, group after group."""
    return [i for group in batch for i in group.indices]


# --------------------------------------------------------------------------------------------------
# Groups


def grouped(indices, requests, batch_tokens: int) -> list[Group]:
    """Put each request into one group.

    In the order of their ids, neighbours have the longest common prefixes. A request joins the
    group before it where that saves tokens.
    """
    in_order = sorted(indices, key=lambda i: requests[i].ids.astype(">u4").tobytes())
    groups = []
    for i in in_order:
        if groups:
            last = groups[-1]
            larger = Group([*last.indices, i], shared_length(last, requests[i], requests))
            if larger.shared > 1 and joining_pays(last, larger, requests, batch_tokens):
                groups[-1] = larger
                continue
        groups.append(Group([i]))
    return groups


def shared_length(group: Group, request: Request, requests) -> int:
    """How many ids the prefix would have if the request joined the group.

    The last id of a request is never shared: the second pass must have something to score.
    """
    first = requests[group.indices[0]].ids
    prefix = first[: group.shared] if group.shared else first[:-1]
    return common_length(prefix, request.ids[:-1])


def common_length(a, b) -> int:
    """How many ids two sequences have in common at their beginning."""
    n = min(len(a), len(b))
    equal = np.append(a[:n] == b[:n], False)
    return int(np.argmin(equal))


def joining_pays(group: Group, larger: Group, requests, batch_tokens: int) -> bool:
    """Whether the larger group fits a batch and saves more tokens than the smaller one."""
    lengths = [len(requests[i].ids) for i in larger.indices]
    fits = len(lengths) * (max(lengths) - 1) <= batch_tokens
    return fits and saved(lengths, larger.shared) > saved(lengths[:-1], group.shared)


def saved(lengths: list[int], shared: int) -> int:
    """How many tokens a group saves if its prefix is read once.

    Only one request of the group has to read the prefix. The suffixes count against that, since the
    second pass costs something, too.
    """
    if len(lengths) == 1:
        return 0
    suffix_tokens = sum(lengths) - len(lengths) * shared
    return (len(lengths) - 1) * shared - suffix_tokens


# --------------------------------------------------------------------------------------------------
# Batches


def all_batches(indices, requests, batch_tokens: int, max_width: int) -> list[list[list[Group]]]:
    """Two lists of batches: of groups with a prefix (two passes), of single requests (one pass).

    All ranks work on the same list at the same time, so they make equally many passes.
    """
    groups = grouped(indices, requests, batch_tokens)
    with_prefix = [group for group in groups if group.shared]
    single = [group for group in groups if not group.shared]
    return [batched(kind, requests, batch_tokens, max_width) for kind in (with_prefix, single)]


class BatchShape(NamedTuple):
    """The size of a batch. Each row is the suffix of one request."""

    groups: int = 0
    rows: int = 0
    tokens: int = 0  # without padding
    longest_prefix: int = 0
    longest_suffix: int = 0

    def plus(self, prefix: int, suffixes: list[int]) -> "BatchShape":
        """The shape with one more group: lengths of its prefix and of its suffixes."""
        return BatchShape(
            groups=self.groups + 1,
            rows=self.rows + len(suffixes),
            tokens=self.tokens + prefix + sum(suffixes),
            longest_prefix=max(self.longest_prefix, prefix),
            longest_suffix=max(self.longest_suffix, *suffixes),
        )

    def fits(self, batch_tokens: int, max_width: int) -> bool:
        """Whether it is small enough, and at most a quarter of it is padding."""
        width = self.longest_prefix + self.longest_suffix - 1  # the last id is a label only
        padded = self.groups * self.longest_prefix + self.rows * self.longest_suffix
        small = self.rows * width <= batch_tokens and width <= max_width
        return small and padded <= self.tokens * 4 / 3


def batched(groups: list[Group], requests, batch_tokens: int, max_width: int) -> list[list[Group]]:
    """Batches of groups of similar lengths, the longest first.

    Each has at most `batch_tokens` tokens and `max_width` columns, or it is a single group.
    """

    def suffixes(group):
        return [len(requests[i].ids) - group.shared for i in group.indices]

    def length(group):
        return group.shared // 8, max(suffixes(group))

    batches = []
    shape = BatchShape()
    for group in sorted(groups, key=length, reverse=True):
        larger = shape.plus(group.shared, suffixes(group))
        if batches and larger.fits(batch_tokens, max_width):
            batches[-1].append(group)
            shape = larger
        else:
            batches.append([group])
            shape = BatchShape().plus(group.shared, suffixes(group))
    return batches


# --------------------------------------------------------------------------------------------------
# The model


@torch.no_grad()
def forward(model, batch: list[Group], requests, device, precision) -> torch.Tensor:
    """Scores of a batch, group after group: (rows, 2) float64 on the CPU, as in `score`."""
    rows = [requests[i] for i in indices_of(batch)]
    shared = [group.shared for group in batch for _ in group.indices]
    # The second pass begins with the last shared id: it predicts the first id of the suffix.
    suffixes = [row.ids[max(0, n - 1) :] for row, n in zip(rows, shared, strict=True)]
    suffix_counts = [min(row.count, len(row.ids) - n) for row, n in zip(rows, shared, strict=True)]
    prefix_counts = [row.count - n for row, n in zip(rows, suffix_counts, strict=True)]

    cache = None
    passes = []  # of each pass (log-probabilities, is it the likeliest?, is it scored?), (rows, T)
    with parallel.autocast(device, precision):
        if batch[0].shared:
            room = max(len(suffix) for suffix in suffixes) - 1
            prefix_pass, cache = read_prefixes(
                model, batch, requests, prefix_counts, room, device, precision
            )
            passes.append(prefix_pass)
        ids, labels = padded(suffixes, suffix_counts, device)
        log_probs, greedy = model(ids, labels=labels, cache=cache, score=True)
        passes.append((log_probs, greedy, labels != IGNORE))

    log_probs, greedy, scored = (torch.cat(parts, dim=1) for parts in zip(*passes, strict=True))
    sums = (log_probs.double() * scored).sum(dim=1)
    all_greedy = (greedy | ~scored).all(dim=1)
    return torch.stack([sums, all_greedy.double()], dim=1).cpu()


def read_prefixes(
    model, batch: list[Group], requests, prefix_counts: list[int], room: int, device, precision
):
    """The first pass: read each group's prefix, except its last id, once.

    prefix_counts: how many ids of its prefix each request scores. room: how many more ids the cache
    must hold. Returns (log-probabilities, is it the likeliest?, is it scored?) of the prefix ids,
    (rows, T) each, and a cache with a row for each request.
    """
    prefixes = [requests[group.indices[0]].ids[: group.shared] for group in batch]
    group_of_row = [number for number, group in enumerate(batch) for _ in group.indices]
    most_scored = [0] * len(batch)  # ids that at least one request of the group scores
    for number, count in zip(group_of_row, prefix_counts, strict=True):
        most_scored[number] = max(most_scored[number], count)
    ids, labels = padded(prefixes, most_scored, device, left=True)
    width = ids.shape[1]

    pad = torch.tensor([width + 1 - len(prefix) for prefix in prefixes], device=device)
    dtype = torch.bfloat16 if precision == "bf16" else next(model.parameters()).dtype
    cache = model.new_cache(len(batch), width, dtype, pad)
    log_probs, greedy = model(ids, labels=labels, cache=cache, score=True)

    # From one row for each group to one row for each request.
    rows = torch.tensor(group_of_row, device=device)
    row_cache = model.new_cache(len(rows), width + room, dtype, pad[rows])
    row_cache.k[:, :, :, :width] = cache.k[:, rows]
    row_cache.v[:, :, :, :width] = cache.v[:, rows]
    row_cache.length = width
    first_scored = width - torch.tensor(prefix_counts, device=device)[:, None]
    scored = torch.arange(width, device=device) >= first_scored
    return (log_probs[rows], greedy[rows], scored), row_cache


def padded(rows, counts, device, left=False) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels (B, T) of rows of ids; the last `count` ids of each row are labels.

    Padded on the right, or on the left.
    """
    width = max(len(row) for row in rows) - 1
    ids = np.zeros((len(rows), width), np.int64)
    labels = np.full((len(rows), width), IGNORE, np.int64)
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        end = width if left else len(row) - 1
        ids[number, end - (len(row) - 1) : end] = row[:-1]
        labels[number, end - count : end] = row[len(row) - count :]
    return torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)

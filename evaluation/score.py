"""Log-probabilities of continuations: contexts that are read once, batches, all ranks.

    log p(continuation | context) = sum over its tokens of log p(token | all tokens before it)

The choices of one question have the same context. The model reads it once and keeps its keys and
values in a cache; a second pass reads the continuations, one row for each choice.

A batch holds groups of similar lengths. Contexts are padded on the left, so that they end together.
Continuations are padded on the right, where a causal model never looks.

    tokens read, padding included    one at a time    contexts once    (GPT-2's ids, zero-shot)
    ARC-Challenge                          169,433           82,664
    PIQA                                   129,989          140,654    its contexts are short
    Winograd                                10,533           10,992    no two contexts are equal

Batches go to the data-parallel ranks in turn. All ranks make equally many passes, since a sharded
model needs all of them for each pass. The stages of a pipeline pass a batch on from the first to
the last, and each has the cache of its own layers.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import parallel
import processes
from evaluation.label_scores import score_labels
from loss import IGNORE


@dataclass
class Request:
    """Token ids (n,) int64, of which the last `count` are scored."""

    ids: np.ndarray
    count: int

    @property
    def context(self) -> np.ndarray:
        """The ids before those that are scored."""
        return self.ids[: -self.count]


class Group(NamedTuple):
    """Indices of requests with the same context of `shared` ids; `shared` is 0 for one request."""

    indices: list[int]
    shared: int = 0


def score(model, requests, world, precision, batch_tokens, title="") -> torch.Tensor:
    """Score all requests. Returns (n, 2) float64 on every rank. A collective.

    Column 0: the sum of the log-probabilities. Column 1: 1 if each token was the likeliest, else 0.

    batch_tokens: the most tokens of a batch on one rank, with padding (one group may exceed it).
    title: of the progress bar; empty for none.
    """
    scores = torch.zeros(len(requests), 2, dtype=torch.float64)
    hide_bar = not title or world.global_rank > 0
    bar = tqdm(desc=title, total=len(requests), unit=" requests", disable=hide_bar)
    with bar:
        for batches in all_batches(requests, batch_tokens, model.cfg.max_seq_len):
            for first in range(0, len(batches), world.dp_size):
                turn = batches[first : first + world.dp_size]  # one for each data-parallel rank
                has_batch = world.dp_rank < len(turn)
                # A rank without a batch repeats the last one, and drops its scores.
                batch = turn[world.dp_rank] if has_batch else turn[-1]
                batch_scores = forward(model, batch, requests, world.device, precision)
                if has_batch:
                    scores[indices_of(batch)] = batch_scores
                bar.update(sum(len(indices_of(batch)) for batch in turn))

    processes.dp_sum(scores, world)
    return scores


def indices_of(batch: list[Group]) -> list[int]:
    """The indices of a batch's requests, group after group."""
    return [i for group in batch for i in group.indices]


# --------------------------------------------------------------------------------------------------
# Groups


def grouped(requests, batch_tokens: int) -> list[Group]:
    """Put each request into one group: those of one context, as many as fit a batch, if it pays."""
    of_context = defaultdict(list)
    for i, request in enumerate(requests):
        of_context[request.context.tobytes()].append(i)

    groups = []
    for members in of_context.values():
        shared = len(requests[members[0]].context)
        longest = max(len(requests[i].ids) for i in members)
        most = max(1, batch_tokens // longest)
        for first in range(0, len(members), most):
            chosen = members[first : first + most]
            # The second pass costs something, too: its tokens count against those that are saved.
            saved = (len(chosen) - 1) * shared - sum(requests[i].count for i in chosen)
            if shared > 1 and saved > 0:
                groups.append(Group(chosen, shared))
            else:
                groups += [Group([i]) for i in chosen]
    return groups


# --------------------------------------------------------------------------------------------------
# Batches


def all_batches(requests, batch_tokens: int, max_width: int) -> list[list[list[Group]]]:
    """Batches of groups with one context (two passes), and of single requests (one pass)."""
    groups = grouped(requests, batch_tokens)
    several = [group for group in groups if group.shared]
    single = [group for group in groups if not group.shared]
    return [batched(kind, requests, batch_tokens, max_width) for kind in (several, single)]


class BatchShape(NamedTuple):
    """The size of a batch. A row is what the second pass reads: the suffix of one request."""

    groups: int = 0
    rows: int = 0
    tokens: int = 0  # without padding
    longest_context: int = 0
    longest_suffix: int = 0

    def plus(self, context: int, suffixes: list[int]) -> "BatchShape":
        """The shape with one more group: lengths of its context and of its suffixes."""
        return BatchShape(
            groups=self.groups + 1,
            rows=self.rows + len(suffixes),
            tokens=self.tokens + context + sum(suffixes),
            longest_context=max(self.longest_context, context),
            longest_suffix=max(self.longest_suffix, *suffixes),
        )

    def fits(self, batch_tokens: int, max_width: int) -> bool:
        """Whether it is small enough, and at most a quarter of it is padding."""
        width = self.longest_context + self.longest_suffix - 1  # the last id is a label only
        padded = self.groups * self.longest_context + self.rows * self.longest_suffix
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
    # The last id of a context is read here: it predicts the first id of the continuation.
    unread = [row.ids[max(0, n - 1) :] for row, n in zip(rows, shared, strict=True)]
    ids, labels = padded(unread, [row.count for row in rows], device)

    with parallel.autocast(device, precision):
        cache = None
        if batch[0].shared:
            cache = read_contexts(model, batch, requests, ids.shape[1], device, precision)
        log_probs, greedy = model(ids, labels=labels, cache=cache, head=score_labels)

    is_scored = labels != IGNORE
    sums = (log_probs.double() * is_scored).sum(dim=1)
    all_greedy = (greedy | ~is_scored).all(dim=1)
    return torch.stack([sums, all_greedy.double()], dim=1).cpu()


def read_contexts(model, batch: list[Group], requests, room: int, device, precision):
    """The first pass: read each group's context, except its last id, once.

    Returns a cache with a row for each request, and room for so many ids more.
    """
    contexts = [requests[group.indices[0]].context for group in batch]
    ids, labels = padded(contexts, [0] * len(batch), device, left=True)
    width = ids.shape[1]
    pad = torch.tensor([width + 1 - len(context) for context in contexts], device=device)
    dtype = torch.bfloat16 if precision == "bf16" else next(model.parameters()).dtype
    cache = model.new_cache(len(batch), width, dtype, pad)
    model(ids, labels=labels, cache=cache, head=score_labels)

    # From one row for each group to one row for each request.
    group_of_row = [number for number, group in enumerate(batch) for _ in group.indices]
    rows = torch.tensor(group_of_row, device=device)
    row_cache = model.new_cache(len(rows), width + room, dtype, pad[rows])
    row_cache.k[:, :, :, :width] = cache.k[:, rows]
    row_cache.v[:, :, :, :width] = cache.v[:, rows]
    row_cache.length = width
    return row_cache


def padded(rows, counts, device, left=False) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels (B, T) of rows of ids; the last `count` ids of each row are labels."""
    width = max(len(row) for row in rows) - 1
    ids = np.zeros((len(rows), width), np.int64)
    labels = np.full((len(rows), width), IGNORE, np.int64)
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        end = width if left else len(row) - 1
        ids[number, end - (len(row) - 1) : end] = row[:-1]
        labels[number, end - count : end] = row[len(row) - count :]
    return torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)

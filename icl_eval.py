"""Zero-shot and few-shot evaluation: the table of the MPT posts for your own model, in two ways of scoring.

    log p(choice | context) = sum over the choice's tokens of log p(token | all tokens before it)

    LLM Foundry                     the choice with the highest mean over its tokens
    lm-evaluation-harness acc       the choice with the highest sum
    lm-evaluation-harness acc_norm  the choice with the highest sum / characters of the choice

The three differ by up to 10 points on one model, so no figure means anything without its scoring, its standard error
and the share of the most frequent answer. Requests are sorted by length and batched by tokens; rank r takes every
n-th batch, and all ranks make equally many passes, as a sharded model needs. Padding is on the right, where a causal
model does not see it. Where it pays, a context is read once for all its choices.

    python icl_eval.py runs/demo --tasks=guess.jsonl,notes.txt --out=results.json
    torchrun --nproc_per_node 4 icl_eval.py runs/my1b --tasks=all --data=icl --shots=5

With --out a run that was cut off goes on where it was: finished tasks are in that file, parts of one in files beside
it. Read next: fsdp_train.py.
"""

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm

import config
import generate
import icl_tasks
import parallel
import tokenizer as tokenizers
from config import MPTConfig, TrainConfig, require
from loss import IGNORE
from model import KVCache
from shards import write_atomically

PART_SECONDS = 30  # between two writes of what is scored so far
NAMES = dict(zip(icl_tasks.TABLE2, "ARC-c ARC-e BoolQ HellaSwag PIQA Winograd Winogrande".split(), strict=True))
PUBLISHED = {  # zero-shot, in the order of TABLE2
    "Cerebras-GPT-1.3B, published": (0.245, 0.445, 0.583, 0.380, 0.668, 0.630, 0.522),
    "MPT-1B, published": (0.254, 0.453, 0.585, 0.516, 0.724, 0.692, 0.536),
    "MPT-3B, published": (0.281, 0.516, 0.528, 0.608, 0.754, 0.751, 0.607),
}
SCORINGS = {"foundry": "LLM Foundry", "acc": "lm-eval acc", "acc_norm": "lm-eval acc_norm"}


@dataclass
class EvalConfig:
    """What is asked, and how."""

    tasks: str = "all"  # names, .jsonl or .txt files, commas between; all: the seven of the posts' table
    data: str = ""  # folder of NAME.jsonl, looked into before the Hub
    delimiter: str = ""  # between question and answer, \n a line break (empty = the task's, else a space)
    shots: int = 0  # solved examples above each question
    seed: int = 0  # of the choice of examples
    limit: int = 0  # of each task the first so many items (0 = all)
    batch_tokens: int = 8192  # of one forward pass of a rank, padding included, at least one sequence
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on accelerators, fp32 on a CPU
    step: int | None = None  # of which checkpoint (none = the newest, 0 = untrained)
    tokenizer: str = ""  # of a Hugging Face folder (empty = its own)
    out: str = ""  # file of all figures, JSON

    def check(self) -> None:
        for name in ("shots", "limit"):
            require(getattr(self, name) >= 0, f"{name} must be 0 or more, not {getattr(self, name)}")
        require(self.batch_tokens > 0, f"batch_tokens must be at least 1, not {self.batch_tokens}")


@dataclass
class Request:
    """Token ids, (n,) int64, of which the last `count` are scored."""

    ids: np.ndarray
    count: int

    @property
    def key(self) -> str:
        return hashlib.blake2b(self.ids.tobytes() + bytes(str(self.count), "ascii"), digest_size=12).hexdigest()


def evaluate(model, tokenizer, tasks, world, precision="fp32", batch_tokens=8192, part=None, progress=False) -> dict:
    """Score tasks of icl_tasks.load on any model, a sharded one in the middle of training too: {name: figures}.

    A collective: call it on every rank with the same tasks. part: see Part. Raises UserError for a continuation that
    is longer than the model, or ids that are beyond its vocabulary.
    """
    training, separator = model.training, model.separator
    model.eval()
    model.separator = None  # a text is one document, behind an end-of-text
    results = {}
    for task in tasks:
        begin = time.perf_counter()
        pairs = pairs_of(task, tokenizer, model.cfg.max_seq_len)
        requests, cut = encode(pairs, tokenizer, task.name, model.cfg)
        sums = score(model, requests, world, precision, batch_tokens, part, task.name if progress else "").tolist()
        scores = {pair: (*sums[i], requests[i].count) for i, pair in enumerate(pairs)}
        figures = summarize_text(task.text, pairs, scores) if task.kind == "text" else summarize(task, scores)
        tokens = sum(len(request.ids) - 1 for request in requests)
        about = {"requests": len(requests), "tokens": tokens, "contexts_cut": cut, "digest": task.digest}
        results[task.name] = {"kind": task.kind, **figures, **about, "seconds": time.perf_counter() - begin}
    model.train(training)
    model.separator = separator
    parallel.free_gathered_weights(model)
    return results


def prepare(m: MPTConfig, cfg: TrainConfig, file: Path):
    """Tasks and tokenizer of a training run, [] and None if it wants none. Raises what `evaluate` would, in time."""
    tasks = icl_tasks.load(cfg.icl_tasks, limit=cfg.icl_limit) if cfg.icl_interval else []
    tokenizer = tokenizers.load(cfg.tokenizer, file) if tasks or m.attn_uses_sequence_id else None
    for task in tasks:
        encode(pairs_of(task, tokenizer, m.max_seq_len), tokenizer, task.name, m)
    return tasks, tokenizer


def pairs_of(task, tokenizer, room: int) -> list[tuple]:
    """The (context, continuation) pairs of a task, each once: texts, or tuples of ids for a text's windows."""
    if task.kind == "text":
        return windows([int(i) for i in tokenizer.encode(task.text)], tokenizer.eot, room)
    both = task.items + task.harness
    return list(dict.fromkeys(pair for item in both for pair in zip(item.contexts, item.continuations, strict=True)))


def windows(ids: list[int], first: int, room: int) -> list[tuple]:
    """A text in pieces of `room` tokens, each token scored once; the last piece sees more of the text before it."""
    before = [first, *ids]  # before[i] is what stands before ids[i]
    pieces = [(begin, min(begin + room, len(ids))) for begin in range(0, len(ids), room)]
    return [(tuple(before[max(0, end - room) : begin + 1]), tuple(ids[begin:end])) for begin, end in pieces]


def encode(pairs, tokenizer, name: str, cfg) -> tuple[list[Request], int]:
    """Requests of at most max_seq_len + 1 ids, and how many contexts were cut on the left for that."""
    known, requests, cut, room = {}, [], 0, cfg.max_seq_len

    def ids_of(text):
        if text not in known:
            known[text] = np.asarray(tokenizer.encode(text) if isinstance(text, str) else text, dtype=np.int64)
        return known[text]

    for context, continuation in pairs:
        if isinstance(context, str):  # a space belongs to the word behind it
            bare = context.rstrip()
            context, continuation = bare, context[len(bare) :] + continuation
        before, scored = ids_of(context), ids_of(continuation)
        before = before if len(before) else np.array([tokenizer.eot])  # nothing said: a new document begins
        require(
            len(scored) <= room,
            f"task {name}: a continuation has {len(scored)} tokens, but max_seq_len is {room}: leave out the item with "
            f"{str(continuation)[:50]!r}",
        )
        cut += len(before) + len(scored) > room + 1
        requests.append(Request(np.concatenate([before, scored])[-(room + 1) :], len(scored)))
    largest = max(int(request.ids.max()) for request in requests)
    require(
        largest < cfg.vocab_size,
        f"task {name}: the tokenizer gives id {largest}, but the model's vocab_size is {cfg.vocab_size}: take its own",
    )
    return requests, cut


def score(model, requests, world, precision, batch_tokens, part=None, title="") -> torch.Tensor:
    """(n, 2) float64 on every rank: sum of the log-probabilities, and 1 where each token was the likeliest."""
    found = torch.zeros(len(requests), 2, dtype=torch.float64)
    known = part.known if part else {}
    keys = [request.key for request in requests] if part else []
    open_ = [i for i in range(len(requests)) if not (part and keys[i] in known)]
    with tqdm(desc=title, total=len(open_), unit=" requests", disable=not title or world.rank > 0) as bar:
        for groups in by_context(open_, requests, model.cfg.max_seq_len):  # those that share a context, then the others
            batches = batched(groups, requests, batch_tokens)
            for turn in range(math.ceil(len(batches) / world.size)):
                mine = turn * world.size + world.rank
                batch = batches[min(mine, len(batches) - 1)]  # a rank without work does the last batch as well
                values = forward(model, [[requests[i] for i in group] for group in batch], world.device, precision)
                numbers = [i for group in batch for i in group]
                if mine < len(batches):
                    found[numbers] = values
                    if part:
                        part.add([keys[i] for i in numbers], values.tolist())
                bar.update(sum(len(g) for b in batches[turn * world.size : (turn + 1) * world.size] for g in b))
    if world.size > 1:
        parallel.all_sum(found)
    for i in set(range(len(requests))) - set(open_):
        found[i] = torch.tensor(known[keys[i]])
    return found


def by_context(numbers, requests, room: int) -> list[list[list[int]]]:
    """[groups of requests with one context, groups of a single request].

    A context is shared where that saves more tokens than its continuations have (a second pass costs something), and
    if it fits `room` tokens with each continuation of the task, which may stand beside it in a batch.
    """
    together, most = {}, max((requests[i].count for i in numbers), default=0)
    for i in numbers:
        together.setdefault(requests[i].ids[: -requests[i].count].tobytes(), []).append(i)
    shared, alone = [], []
    for group in together.values():
        length = len(requests[group[0]].ids) - requests[group[0]].count
        pays = (len(group) - 1) * length > sum(requests[i].count for i in group)
        if pays and 1 < length <= room - most:
            shared.append(group)
        else:
            alone += [[i] for i in group]
    return [shared, alone]


def batched(groups, requests, batch_tokens: int) -> list[list[list[int]]]:
    """Groups of requests, longest first, in batches of at most `batch_tokens`, a quarter of them padding at most."""
    batches, width, rows = [], 0, 0

    def longest(group):
        return max(len(requests[i].ids) for i in group) - 1

    for group in sorted(groups, key=longest, reverse=True):
        length, rows = longest(group), rows + len(group)
        if not batches or rows * width > batch_tokens or length < 0.75 * width:
            batches.append([])
            width, rows = length, len(group)
        batches[-1].append(group)
    return batches


@torch.no_grad()
def forward(model, groups: list[list[Request]], device, precision) -> torch.Tensor:
    """Scores of all requests in groups of one context: (rows, 2) float64 on the CPU, as `score`.

    Groups of several requests read their context once and leave its keys and values in a cache; a second pass goes on
    from there with the last token of the context and each continuation.
    """
    rows, cache, shared = [row for group in groups for row in group], None, len(groups[0]) > 1
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        if shared:
            dtype = torch.bfloat16 if precision == "bf16" else next(model.parameters()).dtype
            cache = read_contexts(model, groups, max(row.count for row in rows), device, dtype)
        inputs = [row.ids[-row.count - 1 :] if shared else row.ids for row in rows]
        ids, labels = (x.to(device) for x in padded(inputs, [row.count for row in rows]))
        log_probs, greedy = model(ids, labels=labels, cache=cache, score=True)  # (rows, T) each
    every = (greedy | (labels == IGNORE)).all(dim=1)
    return torch.stack([log_probs.cpu().double().sum(dim=1), every.cpu().double()], dim=1)


def padded(rows: list[np.ndarray], counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels (B, T), padded on the right; of each row the last `count` ids are labels."""
    width = max(map(len, rows)) - 1
    ids, labels = np.zeros((len(rows), width), np.int64), np.full((len(rows), width), IGNORE, np.int64)
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        n = len(row) - 1
        ids[number, :n] = row[:-1]
        labels[number, n - count : n] = row[-count:]
    return torch.from_numpy(ids), torch.from_numpy(labels)


def read_contexts(model, groups, room: int, device, dtype) -> KVCache:
    """Keys and values of each group's context without its last token, once for each row, and `room` for more."""
    contexts = [group[0].ids[: -group[0].count - 1] for group in groups]
    width = max(map(len, contexts))
    pad = [width - len(context) for context in contexts]  # on the left, so that all end together
    ids = np.stack([np.pad(context, (n, 0)) for context, n in zip(contexts, pad, strict=True)])
    ids, pad = torch.from_numpy(ids).to(device), torch.tensor(pad, device=device)
    cache = KVCache.empty(model.cfg, len(groups), width, device, dtype, pad)
    model(ids, labels=torch.full_like(ids, IGNORE), cache=cache, score=True)
    rows = torch.tensor([number for number, group in enumerate(groups) for _ in group], device=device)
    copies = KVCache.empty(model.cfg, len(rows), width + room, device, dtype, pad[rows])
    copies.k[:, :, :, :width], copies.v[:, :, :, :width] = cache.k[:, rows], cache.v[:, rows]
    copies.length = width
    return copies


# ---------------------------------------------------------------------------------------------------------------
# Figures


def summarize_text(text: str, pairs, scores: dict) -> dict:
    """Of a text in windows. nats_per_byte does not depend on the tokenizer."""
    nats = -sum(scores[pair][0] for pair in pairs)
    tokens, size = sum(scores[pair][2] for pair in pairs), len(text.encode("utf-8", "replace"))
    per = {"nats_per_token": nats / tokens, "nats_per_byte": nats / size, "perplexity": math.exp(nats / tokens)}
    return {"n": tokens, "bytes": size, **per}


def summarize(task, scores: dict) -> dict:
    """The figures of a task from `scores`: (context, continuation) -> (sum of log-probabilities, greedy, tokens)."""
    found = [[scores[pair] for pair in zip(i.contexts, i.continuations, strict=True)] for i in task.items]
    if task.kind == "language_modeling":
        nats, tokens = (sum(column) for column in zip(*((-v[0][0], v[0][2]) for v in found), strict=True))
        right = share("acc", [bool(values[0][1]) for values in found])
        return right | {"perplexity": math.exp(min(700, nats / len(found))), "nats_per_token": nats / tokens}
    theirs = [[scores[pair] for pair in zip(i.contexts, i.continuations, strict=True)] for i in task.harness]
    lengths = [[len(text) - 1 for text in item.continuations] for item in task.harness]  # characters, without the space
    gold = [item.gold for item in task.items]
    sums = [[s for s, _, _ in values] for values in theirs]
    means = [[s / n for s, _, n in values] for values in found]
    norms = [[s / n for s, n in zip(*pair, strict=True)] for pair in zip(sums, lengths, strict=True)]
    result = {}
    for name, values in (("foundry", means), ("acc", sums), ("acc_norm", norms)):
        result |= share(name, [best(v) == g for v, g in zip(values, gold, strict=True)])
    majority = max(gold.count(label) for label in set(gold)) / len(gold)
    return result | {"majority": majority, "chance": sum(1 / len(v) for v in means) / len(gold)}


def best(values: list[float]) -> int:
    """The index of the highest; of equals the first."""
    return max(range(len(values)), key=values.__getitem__)


def share(name: str, right: list[bool]) -> dict:
    """The share of right answers and its standard error: of a mean, with n - 1, as in lm-evaluation-harness."""
    n, p = len(right), sum(right) / len(right)
    return {"n": n, name: p, f"{name}_stderr": math.sqrt(p * (1 - p) / max(1, n - 1))}


def table(results: dict, name: str) -> str:
    """Multiple choice and schema in a table like the posts', in Markdown; the other kinds a line each."""
    chosen = [task for task in results if "foundry" in results[task]]
    seven = [task for task in icl_tasks.TABLE2 if task in chosen]
    columns = [*seven, *(["mean"] if seven else []), *(task for task in chosen if task not in seven)]

    def row(title, values, form="{:.3f}"):
        cells = [form.format(values[column]) if column in values else "" for column in columns]
        return "| " + " | ".join([f"{title:<40}", *(f"{cell:>10}" for cell in cells)]) + " |"

    def with_mean(values):
        return values | ({"mean": sum(values[task] for task in seven) / len(seven)} if seven else {})

    lines = []
    if chosen:
        lines += [row("", {column: NAMES.get(column, column) for column in columns}, "{}")]
        lines += ["|---" * (1 + len(columns)) + "|"]
        lines += [row("items", {task: results[task]["n"] for task in chosen}, "{}")]
        for key, scoring in SCORINGS.items():
            lines += [row(f"{name}, {scoring}", with_mean({task: results[task][key] for task in chosen}))]
            lines += [row("  standard error", {task: results[task][f"{key}_stderr"] for task in chosen})]
        lines += [row("most frequent answer", with_mean({task: results[task]["majority"] for task in chosen}))]
    for model, values in PUBLISHED.items() if seven else ():
        values = dict(zip(icl_tasks.TABLE2, values, strict=True))
        lines += [row(model, with_mean({task: values[task] for task in seven}))]
    for task, r in results.items():
        if r["kind"] == "language_modeling":
            lines += [
                f"{task}: every token the likeliest {r['acc']:.3f} (standard error {r['acc_stderr']:.3f}), "
                f"perplexity {r['perplexity']:.2f}, {r['n']} items"
            ]
        if r["kind"] == "text":
            lines += [
                f"{task}: {r['nats_per_token']:.4f} nats a token, {r['nats_per_byte']:.4f} a byte, "
                f"perplexity {r['perplexity']:.2f}, {r['n']:,} tokens"
            ]
        if r["contexts_cut"]:
            lines += [f"{task}: {r['contexts_cut']} of {r['requests']} contexts were cut on the left to fit the model"]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------
# The program, and what it keeps


class Part:
    """Scores of requests in files beside `out`, one for each rank, so that a run which was cut off goes on there.

    known: {Request.key: [sum, greedy]} of earlier runs, of as many ranks as they had. A collective.
    """

    def __init__(self, out: str, key: str, rank: int):
        self.pattern = f"{Path(out).name}.part-{key}-*"
        self.path = Path(f"{out}.part-{key}-{rank}")
        self.rows, self.written = "", time.monotonic()
        self.known = parallel.rank_zero_decides(self.read)

    def read(self) -> dict:
        known = {}
        for path in self.path.parent.glob(self.pattern):
            for line in path.read_text().splitlines():
                try:
                    key, *values = json.loads(line)
                except ValueError:  # the last line, cut off
                    continue
                known[key] = values
        return known

    def add(self, keys, values) -> None:
        self.rows += "".join(json.dumps([key, *pair]) + "\n" for key, pair in zip(keys, values, strict=True))
        if time.monotonic() - self.written > PART_SECONDS:
            with open(self.path, "a") as file:
                file.write("\n" + self.rows)
            self.rows, self.written = "", time.monotonic()

    def remove(self) -> None:
        """All is finished: the files of all ranks go."""
        for path in self.path.parent.glob(self.pattern):
            path.unlink()


def fingerprint(model) -> str:
    """A short hash of the first numbers of each weight: another model, or another step, has another."""
    heads = [p.detach().flatten()[:16].float().cpu().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(heads)).hexdigest()[:16]


def finished(out: str, about: dict) -> dict:
    """The results in an earlier `out`. Raises UserError if they are another model's."""
    if not (out and Path(out).exists()):
        return {}
    try:
        earlier = json.loads(Path(out).read_text())
        same = {key: earlier["settings"][key] for key in ("weights", "precision", "ids")}
        results = earlier["tasks"]
    except (ValueError, KeyError, TypeError) as error:
        raise config.UserError(f"{out} holds no results of icl_eval.py: choose another --out") from error
    for key, value in same.items():
        require(value == about[key], f"{out} holds results with {key} {value}, not {about[key]}: choose another --out")
    return results


def main(argv) -> None:
    runs = [arg for arg in argv if not arg.startswith("-")]
    (cfg,) = config.load([arg for arg in argv if arg.startswith("-")], EvalConfig)
    require(len(runs) == 1, "usage: python icl_eval.py RUN [--tasks=...] (--help lists the settings)")
    require(not cfg.out or Path(cfg.out).absolute().parent.is_dir(), f"no folder for --out={cfg.out}: make it first")
    world = parallel.start()
    how = (cfg.data, cfg.shots, cfg.seed, cfg.limit, cfg.delimiter.replace("\\n", "\n"))
    tasks = parallel.rank_zero_decides(lambda: icl_tasks.load(cfg.tasks, *how))
    model, tokenizer, name = generate.load_for_sampling(runs[0], cfg.step, world.device, cfg.tokenizer)
    precision = "fp32" if cfg.precision == "auto" and world.device.type == "cpu" else cfg.precision
    precision = parallel.choose_precision(TrainConfig(precision=precision), world.device)
    about = {**asdict(cfg), "model": name, "weights": fingerprint(model), "precision": precision}
    about |= {"tokenizer": tokenizer.name, "ids": tokenizer.fingerprint}
    model = model.float() if precision == "fp32" else model
    done = parallel.rank_zero_decides(lambda: finished(cfg.out, about))
    part = Part(cfg.out, f"{about['weights']}-{precision}", world.rank) if cfg.out else None
    for task in tasks:
        if done.get(task.name, {}).get("digest") == task.digest:
            continue
        done |= evaluate(model, tokenizer, [task], world, precision, cfg.batch_tokens, part, progress=True)
        if cfg.out and world.rank == 0:
            write_atomically(Path(cfg.out), json.dumps({"settings": about, "tasks": done}, indent=2).encode())
    if world.rank == 0:
        if part:
            part.remove()
        print(table({task.name: done[task.name] for task in tasks}, name))


if __name__ == "__main__":
    parallel.run(main)

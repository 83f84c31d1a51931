"""Zero-shot and few-shot evaluation: the table of the MPT posts for your own model, in two ways of scoring.

    log p(choice | context) = sum over the choice's tokens of log p(token | all tokens before it)

    LLM Foundry                     the choice with the highest mean over its tokens
    lm-evaluation-harness acc       the choice with the highest sum
    lm-evaluation-harness acc_norm  the choice with the highest sum / characters of the choice

The three differ by up to 10 points on one model, so no figure means anything without its scoring, its standard error
and the share of the most frequent answer. How requests are batched, and spread over ranks: evaluation/score.py.

    python -m evaluation runs/demo --tasks=guess.jsonl,notes.txt --out=results.json
    torchrun --nproc_per_node 4 -m evaluation runs/my1b --tasks=all --data=icl --shots=5

With --out a run that was cut off goes on where it was: finished tasks are in that file, parts of one in files beside
it. Read next: serving/sampling.py.
"""

import contextlib
import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import config
import parallel
import processes
from config import MPTConfig, TrainConfig, UserError, require
from evaluation import tasks as icl_tasks
from evaluation.score import Request, score
from storage import files
from text import tokenizer as tokenizers
from weights import load

PART_SECONDS = 30  # between two writes of what is scored so far
NAMES = dict(
    zip(
        icl_tasks.TABLE2,
        "ARC-c ARC-e BoolQ HellaSwag PIQA Winograd Winogrande".split(),
        strict=True,
    )
)
PUBLISHED = {  # zero-shot, in the order of TABLE2
    "Cerebras-GPT-1.3B, published": (0.245, 0.445, 0.583, 0.380, 0.668, 0.630, 0.522),
    "MPT-1B, published": (0.254, 0.453, 0.585, 0.516, 0.724, 0.692, 0.536),
    "MPT-3B, published": (0.281, 0.516, 0.528, 0.608, 0.754, 0.751, 0.607),
}
SCORINGS = {"foundry": "LLM Foundry", "acc": "lm-eval acc", "acc_norm": "lm-eval acc_norm"}
CHOICE = "n contexts_cut requests majority foundry acc acc_norm foundry_stderr acc_stderr acc_norm_stderr".split()
FIGURES = {  # of each kind, what the table prints
    "multiple_choice": CHOICE,
    "schema": CHOICE,
    "language_modeling": "n contexts_cut requests acc acc_stderr perplexity".split(),
    "text": "n contexts_cut requests nats_per_token nats_per_byte perplexity".split(),
}


@dataclass
class EvalConfig:
    """What is asked, and how."""

    tasks: str = (
        "all"  # names, .jsonl or .txt files, commas between; all: the seven of the posts' table
    )
    data: str = ""  # folder of NAME.jsonl, looked into before the Hub
    delimiter: str = (
        ""  # between question and answer, \n a line break (empty = the task's, else a space)
    )
    shots: int = 0  # solved examples above each question
    seed: int = 0  # of the choice of examples
    limit: int = 0  # of each task the first so many items (0 = all)
    batch_tokens: int = 8192  # of a batch of a rank, padding included (one question may have more)
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on accelerators, fp32 on a CPU
    step: int | None = None  # of which checkpoint (none = the newest, 0 = untrained)
    tokenizer: str = ""  # of a Hugging Face folder (empty = its own)
    out: str = ""  # file of all figures, JSON

    def check(self) -> None:
        for name in ("shots", "limit"):
            require(
                getattr(self, name) >= 0, f"{name} must be 0 or more, not {getattr(self, name)}"
            )
        require(self.batch_tokens > 0, f"batch_tokens must be at least 1, not {self.batch_tokens}")


def evaluate(
    model, tokenizer, tasks, world, precision="fp32", batch_tokens=8192, part=None, progress=False
) -> dict:
    """Score tasks on any model, a sharded one in the middle of training too: {name: figures}.

    A collective: call it on every rank with the same tasks. part: see Part. Raises UserError for a continuation that
    is longer than the model, or ids that are beyond its vocabulary.
    """
    training, separator = model.training, model.separator
    model.eval()
    model.separator = None  # a text is one document, behind an end-of-text
    stance = (
        "default" if model.cfg.attn_impl == "flex" else "force_eager"
    )  # flex needs its compiler
    results = {}
    for task in tasks:
        begin = time.perf_counter()
        pairs = pairs_of(task, tokenizer, model.cfg.max_seq_len)
        requests, cut = encode(pairs, tokenizer, task.name, model.cfg)
        with torch.compiler.set_stance(
            stance
        ):  # compiled blocks would be compiled anew for many shapes
            sums = score(
                model, requests, world, precision, batch_tokens, part, task.name if progress else ""
            ).tolist()
        scores = {pair: (*sums[i], requests[i].count) for i, pair in enumerate(pairs)}
        figures = (
            summarize_text(task.text, pairs, scores)
            if task.kind == "text"
            else summarize(task, scores)
        )
        tokens = sum(len(request.ids) - 1 for request in requests)
        about = {
            "requests": len(requests),
            "tokens": tokens,
            "contexts_cut": cut,
            "digest": task.digest,
        }
        results[task.name] = {
            "kind": task.kind,
            **figures,
            **about,
            "seconds": time.perf_counter() - begin,
        }
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
    return list(
        dict.fromkeys(
            pair for item in both for pair in zip(item.contexts, item.continuations, strict=True)
        )
    )


def windows(ids: list[int], first: int, room: int) -> list[tuple]:
    """A text in pieces of `room` tokens, each token scored once; the last piece sees more of the text before it."""
    before = [first, *ids]  # before[i] is what stands before ids[i]
    pieces = [(begin, min(begin + room, len(ids))) for begin in range(0, len(ids), room)]
    return [
        (tuple(before[max(0, end - room) : begin + 1]), tuple(ids[begin:end]))
        for begin, end in pieces
    ]


def encode(pairs, tokenizer, name: str, cfg) -> tuple[list[Request], int]:
    """Requests of at most max_seq_len + 1 ids, and how many contexts were cut on the left for that."""
    known, requests, cut, room = {}, [], 0, cfg.max_seq_len

    def ids_of(text):
        if text not in known:
            known[text] = np.asarray(
                tokenizer.encode(text) if isinstance(text, str) else text, dtype=np.int64
            )
        return known[text]

    for context, continuation in pairs:
        if isinstance(context, str):  # a space belongs to the word behind it
            bare = context.rstrip()
            context, continuation = bare, context[len(bare) :] + continuation
        before, scored = ids_of(context), ids_of(continuation)
        before = (
            before if len(before) else np.array([tokenizer.eot])
        )  # nothing said: a new document begins
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


# ---------------------------------------------------------------------------------------------------------------
# Figures


def summarize_text(text: str, pairs, scores: dict) -> dict:
    """Of a text in windows. nats_per_byte does not depend on the tokenizer."""
    nats = -sum(scores[pair][0] for pair in pairs)
    tokens, size = sum(scores[pair][2] for pair in pairs), len(text.encode("utf-8", "replace"))
    per = {
        "nats_per_token": nats / tokens,
        "nats_per_byte": nats / size,
        "perplexity": math.exp(nats / tokens),
    }
    return {"n": tokens, "bytes": size, **per}


def summarize(task, scores: dict) -> dict:
    """The figures of a task from `scores`: (context, continuation) -> (sum of log-probabilities, greedy, tokens)."""
    found = [
        [scores[pair] for pair in zip(i.contexts, i.continuations, strict=True)] for i in task.items
    ]
    if task.kind == "language_modeling":
        nats, tokens = (
            sum(column) for column in zip(*((-v[0][0], v[0][2]) for v in found), strict=True)
        )
        right = share("acc", [bool(values[0][1]) for values in found])
        return right | {
            "perplexity": math.exp(min(700, nats / len(found))),
            "nats_per_token": nats / tokens,
        }
    theirs = [
        [scores[pair] for pair in zip(i.contexts, i.continuations, strict=True)]
        for i in task.harness
    ]
    lengths = [
        [len(text) - 1 for text in item.continuations] for item in task.harness
    ]  # characters, without the space
    gold = [item.gold for item in task.items]
    sums = [[s for s, _, _ in values] for values in theirs]
    means = [[s / n for s, _, n in values] for values in found]
    norms = [
        [s / n for s, n in zip(*pair, strict=True)] for pair in zip(sums, lengths, strict=True)
    ]
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
    columns = [
        *seven,
        *(["mean"] if seven else []),
        *(task for task in chosen if task not in seven),
    ]

    def row(title, values, form="{:.3f}"):
        cells = [form.format(values[column]) if column in values else "" for column in columns]
        return "| " + " | ".join([f"{title:<40}", *(f"{cell:>10}" for cell in cells)]) + " |"

    def with_mean(values):
        return values | (
            {"mean": sum(values[task] for task in seven) / len(seven)} if seven else {}
        )

    lines = []
    if chosen:
        lines += [row("", {column: NAMES.get(column, column) for column in columns}, "{}")]
        lines += ["|---" * (1 + len(columns)) + "|"]
        lines += [row("items", {task: results[task]["n"] for task in chosen}, "{}")]
        for key, scoring in SCORINGS.items():
            lines += [
                row(f"{name}, {scoring}", with_mean({task: results[task][key] for task in chosen}))
            ]
            lines += [
                row("  standard error", {task: results[task][f"{key}_stderr"] for task in chosen})
            ]
        lines += [
            row(
                "most frequent answer",
                with_mean({task: results[task]["majority"] for task in chosen}),
            )
        ]
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
            lines += [
                f"{task}: {r['contexts_cut']} of {r['requests']} contexts were cut on the left to fit the model"
            ]
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
        self.known = processes.rank_zero_decides(self.read)

    def read(self) -> dict:
        known = {}
        for path in self.path.parent.glob(self.pattern):
            for line in files.read_bytes(path).split(b"\n"):
                with contextlib.suppress(UserError):  # a line that was cut off
                    key, *values = files.parse_json(line, str(path), list) or [None]
                    if (
                        isinstance(key, str)
                        and len(values) == 2
                        and all(files.has_type(v, float) for v in values)
                    ):
                        known[key] = values
        return known

    def add(self, keys, values) -> None:
        self.rows += "".join(
            json.dumps([key, *pair]) + "\n" for key, pair in zip(keys, values, strict=True)
        )
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


def has_figures(result) -> bool:
    """Whether an earlier result is one that `table` can print; one without a digest is computed again."""
    if not isinstance(result, dict) or "digest" not in result:
        return isinstance(result, dict)
    names = FIGURES.get(result["kind"]) if isinstance(result.get("kind"), str) else None
    return names is not None and all(files.has_type(result.get(name), float) for name in names)


def finished(out: str, about: dict) -> dict:
    """The results in an earlier `out`. Raises UserError if they are another model's."""
    if not (out and Path(out).exists()):
        return {}
    other = f"{out} holds no results of `python -m evaluation`: choose another --out"
    earlier = files.read_json(out, dict, {"settings": dict, "tasks": dict}, "choose another --out")
    same = {key: earlier["settings"].get(key) for key in ("weights", "precision", "ids")}
    results = earlier["tasks"]
    require(None not in same.values() and all(map(has_figures, results.values())), other)
    for key, value in same.items():
        require(
            value == about[key],
            f"{out} holds results with {key} {config.one_line(value)}, not {about[key]}: choose another --out",
        )
    return results


def main(argv) -> None:
    (run,), cfg = config.load(argv, EvalConfig, takes="RUN")
    require(
        not cfg.out or Path(cfg.out).absolute().parent.is_dir(),
        f"no folder for --out={cfg.out}: make it first",
    )
    load.find(run)  # first, since the tasks may come from the Hub, slowly
    world = processes.start()
    how = (cfg.data, cfg.shots, cfg.seed, cfg.limit, cfg.delimiter.replace("\\n", "\n"))
    tasks = processes.rank_zero_decides(lambda: icl_tasks.load(cfg.tasks, *how))
    model, tokenizer, name = load.load_for_sampling(run, cfg.step, world.device, cfg.tokenizer)
    precision = "fp32" if cfg.precision == "auto" and world.device.type == "cpu" else cfg.precision
    precision = parallel.choose_precision(TrainConfig(precision=precision), world.device)
    about = {**asdict(cfg), "model": name, "weights": fingerprint(model), "precision": precision}
    about |= {"tokenizer": tokenizer.name, "ids": tokenizer.fingerprint}
    model = model.float() if precision == "fp32" else model
    done = processes.rank_zero_decides(lambda: finished(cfg.out, about))
    part = Part(cfg.out, f"{about['weights']}-{precision}", world.global_rank) if cfg.out else None
    for task in tasks:
        if done.get(task.name, {}).get("digest") == task.digest:
            continue
        done |= evaluate(
            model, tokenizer, [task], world, precision, cfg.batch_tokens, part, progress=True
        )
        if cfg.out and world.global_rank == 0:
            files.write_atomically(
                Path(cfg.out), json.dumps({"settings": about, "tasks": done}, indent=2).encode()
            )
    if world.global_rank == 0:
        if part:
            part.remove()
        print(table({task.name: done[task.name] for task in tasks}, name))


if __name__ == "__main__":
    processes.run(main)

"""Zero-shot and few-shot evaluation: the table of the MPT posts for your own model.

    log p(choice | context) = sum over the choice's tokens of log p(token | all tokens before it)

The choice with the highest value is the model's answer. Three rules derive the value from the
log-probability: evaluation/figures.py. How requests are batched and spread over the ranks:
evaluation/score.py.

    python -m evaluation runs/demo --tasks=guess.jsonl,notes.txt --out=results.json
    torchrun --nproc_per_node 4 -m evaluation runs/my1b --tasks=all --data=icl --shots=5
    torchrun --nproc_per_node 8 -m evaluation runs/my70b --tp=8    too large for one device

With --out, an interrupted evaluation goes on with its next task.
"""

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import config
import devices
import parallel
import processes
import program
import tensor_parallel
from config import Int, MPTConfig, TrainConfig
from evaluation import tasks as icl_tasks
from evaluation.figures import summarize, table
from evaluation.score import Request, score
from program import UserError, require
from storage import files
from text import tokenizer as tokenizers
from weights import load


@dataclass
class EvalConfig:
    """Tasks, scoring, model, output."""

    tasks: str = "all"  # names, .jsonl or .txt files, separated by commas; all: MosaicML's seven
    data: str = ""  # folder of NAME.jsonl, searched before the Hub
    delimiter: str = ""  # between question and answer, as in "\n" (empty = the task's, or a space)
    shots: Int[0, 10**9] = 0  # solved examples above each question
    seed: Int[0, 10**18] = 0  # of the choice of examples
    limit: Int[0, 10**9] = 0  # use at most this many items of each task (0 = all)
    batch_tokens: Int[1, 10**9] = 8192  # of a rank's batch, with padding (a question may have more)
    tp: Int[1, 2**16] = 1  # ranks over which each layer is cut: see tensor_parallel.py
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on accelerators, fp32 on a CPU
    step: int | None = None  # which checkpoint (none = the newest, 0 = untrained)
    tokenizer: str = ""  # of a Hugging Face folder (empty = its own)
    out: str = ""  # JSON file for all figures


# --------------------------------------------------------------------------------------------------
# Evaluating any model, also in the middle of training


def evaluate(
    model, tokenizer, tasks, world, precision="fp32", batch_tokens=8192, progress=False
) -> dict:
    """Score tasks on any model, also on a sharded one during training: {name: figures}.

    A collective: call it on every rank with the same tasks. Raises UserError for a continuation
    that is longer than the model's context, and for ids beyond its vocabulary.
    """
    training = model.training
    separator = model.separator
    model.eval()
    model.separator = None  # each request is one document

    results = {}
    for task in tasks:
        begin = time.perf_counter()
        pairs = pairs_of(task, tokenizer, model.cfg.max_seq_len)
        requests, contexts_cut = encode(pairs, tokenizer, task.name, model.cfg)
        title = task.name if progress else ""
        with parallel.run_uncompiled(model):
            values = score(model, requests, world, precision, batch_tokens, title).tolist()
        scores = {
            pair: (log_prob, greedy, request.count)
            for pair, (log_prob, greedy), request in zip(pairs, values, requests, strict=True)
        }
        results[task.name] = {
            "kind": task.kind,
            **summarize(task, pairs, scores),
            "requests": len(requests),
            "tokens": sum(len(request.ids) - 1 for request in requests),
            "contexts_cut": contexts_cut,
            "digest": task.digest,
            "seconds": time.perf_counter() - begin,
        }

    model.train(training)
    model.separator = separator
    parallel.free_gathered_weights(model)
    return results


def prepare(m: MPTConfig, cfg: TrainConfig, file: Path):
    """The tasks and the tokenizer of a training run that evaluates them.

    file: of the tokenizer. Encodes all tasks, so that a UserError is raised before training
    begins and not at the first evaluation.
    """
    tasks = icl_tasks.load(cfg.icl_tasks, limit=cfg.icl_limit)
    tokenizer = tokenizers.load(cfg.tokenizer, file)
    for task in tasks:
        encode(pairs_of(task, tokenizer, m.max_seq_len), tokenizer, task.name, m)
    return tasks, tokenizer


# --------------------------------------------------------------------------------------------------
# From tasks to requests


def pairs_of(task, tokenizer, max_seq_len: int) -> list[tuple]:
    """The (context, continuation) pairs of a task, each once. Those of a text are tuples of ids."""
    if task.kind == "text":
        ids = [int(i) for i in tokenizer.encode(task.text)]
        return windows(ids, tokenizer.eot, max_seq_len)
    pairs = []
    for item in task.items + task.harness:
        pairs += zip(item.contexts, item.continuations, strict=True)
    return list(dict.fromkeys(pairs))


def windows(ids: list[int], first: int, size: int) -> list[tuple]:
    """A text as (context, continuation) pairs of ids that score each id once.

    `first`, the id of end-of-text, is the context of the first id. A window has `size`
    inputs at most. The last one has more context, so that it is as long as the others.
    """
    inputs = [first, *ids]  # inputs[i] comes before ids[i]
    pairs = []
    for begin in range(0, len(ids), size):
        end = min(begin + size, len(ids))
        context = inputs[max(0, end - size) : begin + 1]
        pairs.append((tuple(context), tuple(ids[begin:end])))
    return pairs


def encode(pairs, tokenizer, name: str, cfg: MPTConfig) -> tuple[list[Request], int]:
    """Requests of at most max_seq_len + 1 ids, and how many contexts were cut on the left to fit.

    name: of the task, for messages. Raises UserError for a continuation that does not fit the
    model, and for ids beyond its vocabulary.
    """
    most = cfg.max_seq_len + 1
    known = {}
    requests = []
    contexts_cut = 0

    def ids_of(text):
        if text not in known:
            ids = tokenizer.encode(text) if isinstance(text, str) else text
            known[text] = np.asarray(ids, dtype=np.int64)
        return known[text]

    for context, continuation in pairs:
        if isinstance(context, str):  # tokens begin with their space
            bare = context.rstrip()
            context, continuation = bare, context[len(bare) :] + continuation
        context_ids = ids_of(context)
        scored_ids = ids_of(continuation)
        if len(context_ids) == 0:
            context_ids = np.array([tokenizer.eot])  # a new document begins
        require(
            len(scored_ids) < most,
            f"task {name}: a continuation has {len(scored_ids)} tokens, but max_seq_len is "
            f"{cfg.max_seq_len}: remove the item with {str(continuation)[:50]!r}",
        )
        ids = np.concatenate([context_ids, scored_ids])
        contexts_cut += len(ids) > most
        requests.append(Request(ids[-most:], len(scored_ids)))

    largest = max(int(request.ids.max()) for request in requests)
    require(
        largest < cfg.vocab_size,
        f"task {name}: the tokenizer gives id {largest}, but the model's vocab_size is "
        f"{cfg.vocab_size}: use the tokenizer of the model",
    )
    return requests, contexts_cut


# --------------------------------------------------------------------------------------------------
# Files of results: the settings, and the figures of all finished tasks


def finished(out: str, settings: dict) -> dict:
    """{task: figures} of an earlier `out`. UserError if weights, precision or ids are others."""
    if not (out and Path(out).exists()):
        return {}
    fix = "choose another --out"
    earlier = files.read_json(out, dict, {"settings": dict, "tasks": dict}, fix)
    for key in ("weights", "precision", "ids"):
        value = program.one_line(earlier["settings"].get(key))
        problem = f"{out} holds results with {key} {value}, not {settings[key]}"
        require(value == settings[key], f"{problem}: {fix}")
    results = earlier["tasks"]
    try:
        table({task: figures for task, figures in results.items() if figures.get("digest")}, "")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{out} holds no results of `python -m evaluation`: {fix}") from error
    return results


def fingerprint(model) -> str:
    """A short hash of the first 16 numbers of each weight: it tells models and steps apart."""
    heads = []
    for param in model.parameters():
        heads.append(param.detach().flatten()[:16].float().cpu().numpy().tobytes())
    return hashlib.sha256(b"".join(heads)).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------
# The program


def main(argv) -> None:
    """Evaluate the model of a run or a Hugging Face folder, and print the table."""
    (run,), cfg = config.load(argv, EvalConfig, takes="RUN")
    out_folder = Path(cfg.out).absolute().parent
    require(not cfg.out or out_folder.is_dir(), f"no folder for --out={cfg.out}: make it first")
    found = load.find(run)  # before the tasks, which may come from the Hub, slowly
    load.settings_of(found).check_tensor_ranks(cfg.tp, sequence_parallel=False)
    world = processes.start(tp=cfg.tp)
    team = tensor_parallel.team_of(world)
    delimiter = cfg.delimiter.replace("\\n", "\n")
    tasks = processes.rank_zero_decides(
        lambda: icl_tasks.load(cfg.tasks, cfg.data, cfg.shots, cfg.seed, cfg.limit, delimiter)
    )

    precision = pick_precision(cfg.precision, world.device)
    model, tokenizer, name = load.load_for_sampling(
        run, cfg.step, world.device, cfg.tokenizer, team, in_fp32=precision == "fp32"
    )
    settings = {
        **asdict(cfg),
        "model": name,
        "weights": processes.rank_zero_decides(lambda: fingerprint(model)),
        "precision": precision,
        "tokenizer": tokenizer.name,
        "ids": tokenizer.fingerprint,
    }
    if precision == "fp32":
        model = model.float()

    results = processes.rank_zero_decides(lambda: finished(cfg.out, settings))
    for task in tasks:
        if results.get(task.name, {}).get("digest") == task.digest:
            continue
        results |= evaluate(
            model, tokenizer, [task], world, precision, cfg.batch_tokens, progress=True
        )
        if cfg.out and world.global_rank == 0:
            content = json.dumps({"settings": settings, "tasks": results}, indent=2)
            files.write_atomically(Path(cfg.out), content.encode())

    if world.global_rank == 0:
        print(table({task.name: results[task.name] for task in tasks}, name))


def pick_precision(precision: str, device: torch.device) -> str:
    """fp32 or bf16. For `auto` fp32 on a CPU, bf16 on an accelerator that computes in it."""
    if precision != "auto":
        return precision
    if device.type == "cpu":
        return "fp32"
    return "bf16" if devices.computes_in_bf16(device) else "fp32"


if __name__ == "__main__":
    processes.run(main)

"""Figures of a task from the scores of its requests, and the table of all tasks.

    LLM Foundry                     the choice with the highest mean over its tokens
    lm-evaluation-harness acc       the choice with the highest sum
    lm-evaluation-harness acc_norm  the choice with the highest sum / characters of the choice

The three differ by up to 10 points on one model. So an accuracy means something only beside its
scoring rule, its standard error and the share of the most frequent answer.
"""

import math

from evaluation.hub import TABLE2
from evaluation.tasks import Item, Task

SHORT_NAMES = ["ARC-c", "ARC-e", "BoolQ", "HellaSwag", "PIQA", "Winograd", "Winogrande"]
NAMES = dict(zip(TABLE2, SHORT_NAMES, strict=True))
PUBLISHED = {  # zero-shot, in the order of TABLE2
    "Cerebras-GPT-1.3B, published": (0.245, 0.445, 0.583, 0.380, 0.668, 0.630, 0.522),
    "MPT-1B, published": (0.254, 0.453, 0.585, 0.516, 0.724, 0.692, 0.536),
    "MPT-3B, published": (0.281, 0.516, 0.528, 0.608, 0.754, 0.751, 0.607),
}
SCORINGS = {"foundry": "LLM Foundry", "acc": "lm-eval acc", "acc_norm": "lm-eval acc_norm"}

# --------------------------------------------------------------------------------------------------
# Figures of one task. scores: (context, continuation) -> (log-probability, greedy, tokens)


def summarize(task: Task, pairs: list[tuple], scores: dict) -> dict:
    """The figures of a task. `pairs` are its (context, continuation) pairs, each once."""
    if task.kind == "text":
        return summarize_text(task.text, pairs, scores)
    if task.kind == "language_modeling":
        return summarize_language_modeling(task, scores)
    return summarize_choices(task, scores)


def summarize_text(text: str, pairs: list[tuple], scores: dict) -> dict:
    """The figures of a text in windows. nats_per_byte is comparable across tokenizers."""
    nats = -sum(scores[pair][0] for pair in pairs)
    tokens = sum(scores[pair][2] for pair in pairs)
    size = len(text.encode("utf-8", "replace"))
    return {
        "n": tokens,
        "bytes": size,
        "nats_per_token": nats / tokens,
        "nats_per_byte": nats / size,
        "perplexity": math.exp(nats / tokens),
    }


def summarize_language_modeling(task: Task, scores: dict) -> dict:
    """acc: the share of items in which every token is the likeliest. perplexity: of an item."""
    results = [item_scores(item, scores)[0] for item in task.items]
    nats = sum(-log_prob for log_prob, _, _ in results)
    tokens = sum(count for _, _, count in results)
    return {
        **accuracy("acc", [bool(greedy) for _, greedy, _ in results]),
        "perplexity": math.exp(min(700, nats / len(results))),  # e^700 is near fp64's largest
        "nats_per_token": nats / tokens,
    }


def summarize_choices(task: Task, scores: dict) -> dict:
    """Accuracy by each of SCORINGS, beside the most frequent answer and chance."""
    foundry = [mean_per_token(item, scores) for item in task.items]
    sums, norms = [], []
    for item in task.harness:
        totals = [log_prob for log_prob, _, _ in item_scores(item, scores)]
        lengths = [len(text) - 1 for text in item.continuations]  # without the space
        sums.append(totals)
        norms.append([total / n for total, n in zip(totals, lengths, strict=True)])

    gold = [item.gold for item in task.items]
    figures = {}
    for name, values in (("foundry", foundry), ("acc", sums), ("acc_norm", norms)):
        right = [best(value) == answer for value, answer in zip(values, gold, strict=True)]
        figures |= accuracy(name, right)

    most_frequent = max(gold.count(answer) for answer in set(gold))
    chances = [1 / len(item.contexts) for item in task.items]
    return figures | {"majority": most_frequent / len(gold), "chance": sum(chances) / len(gold)}


def item_scores(item: Item, scores: dict) -> list[tuple]:
    """(log-probability, greedy, tokens) of each choice."""
    return [scores[pair] for pair in zip(item.contexts, item.continuations, strict=True)]


def mean_per_token(item: Item, scores: dict) -> list[float]:
    """LLM Foundry's value of each choice."""
    return [log_prob / tokens for log_prob, _, tokens in item_scores(item, scores)]


def best(values: list[float]) -> int:
    """The index of the highest value; of equal ones the first."""
    return max(range(len(values)), key=values.__getitem__)


def accuracy(name: str, right: list[bool]) -> dict:
    """The share of right answers, and its standard error with the divisor n - 1, as in lm-eval."""
    n = len(right)
    p = sum(right) / n
    return {"n": n, name: p, f"{name}_stderr": math.sqrt(p * (1 - p) / max(1, n - 1))}


# --------------------------------------------------------------------------------------------------
# The table of all tasks


def table(results: dict, name: str) -> str:
    """The Markdown table of {task: figures}, as in the posts, then a line for each other kind."""
    chosen = {task: r for task, r in results.items() if "foundry" in r}
    lines = choice_table(chosen, name) if chosen else []
    for task, r in results.items():
        if r["kind"] == "language_modeling":
            lines.append(
                f"{task}: accuracy (every token the likeliest) {r['acc']:.3f} "
                f"(standard error {r['acc_stderr']:.3f}), "
                f"perplexity {r['perplexity']:.2f}, {r['n']} items"
            )
        if r["kind"] == "text":
            lines.append(
                f"{task}: {r['nats_per_token']:.4f} nats per token, "
                f"{r['nats_per_byte']:.4f} per byte, "
                f"perplexity {r['perplexity']:.2f}, {r['n']:,} tokens"
            )
        if r["contexts_cut"]:
            lines.append(
                f"{task}: {r['contexts_cut']} of {r['requests']} contexts were cut on the left "
                "to fit the model"
            )
    return "\n".join(lines)


def choice_table(results: dict, name: str) -> list[str]:
    """The lines of the Markdown table: the posts' tasks, their mean, then all others."""
    in_posts = [task for task in TABLE2 if task in results]
    others = [task for task in results if task not in in_posts]
    mean = ["mean"] if in_posts else []
    columns = [*in_posts, *mean, *others]

    def row(title, values, form="{:.3f}"):
        cells = [form.format(values[column]) if column in values else "" for column in columns]
        return "| " + " | ".join([f"{title:<40}", *(f"{cell:>10}" for cell in cells)]) + " |"

    def figure(key):
        return {task: results[task][key] for task in results}

    def with_mean(values):
        """Add the mean of the posts' tasks."""
        if in_posts:
            values["mean"] = sum(values[task] for task in in_posts) / len(in_posts)
        return values

    lines = [
        row("", {column: NAMES.get(column, column) for column in columns}, "{}"),
        "|---" * (1 + len(columns)) + "|",
        row("items", figure("n"), "{}"),
    ]
    for key, scoring in SCORINGS.items():
        lines.append(row(f"{name}, {scoring}", with_mean(figure(key))))
        lines.append(row("  standard error", figure(f"{key}_stderr")))
    lines.append(row("most frequent answer", with_mean(figure("majority"))))
    if in_posts:
        for model, published in PUBLISHED.items():
            values = dict(zip(TABLE2, published, strict=True))
            lines.append(row(model, with_mean({task: values[task] for task in in_posts})))
    return lines

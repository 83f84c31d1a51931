"""Tasks of the Hugging Face Hub: from the rows of the original data sets to rows of our format.

    {"goal": "boil water", "sol1": "Heat it.", "sol2": "Cool it.", "label": 0}                PIQA
    {"query": "Question: boil water", "choices": ["Heat it.", "Cool it."], "gold": 0}         ours

The wording is LLM Foundry's. evaluation/tasks.py appends the delimiter and the choice to a query.
lm-evaluation-harness words BoolQ without "Passage: ": `Source.harness`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from program import UserError
from storage import downloads


def arc(row: dict) -> dict:
    """ARC-Challenge and ARC-Easy."""
    labels = row["choices"]["label"]
    return {
        "query": f"Question: {row['question']}",
        "choices": row["choices"]["text"],
        "gold": labels.index(row["answerKey"]),
    }


def boolq(row: dict) -> dict:
    """BoolQ: a passage, and a question that is answered by no or yes."""
    return {
        "query": f"Passage: {row['passage']}\nQuestion: {row['question']}?",
        "choices": ["no", "yes"],
        "gold": int(row["label"]),
    }


def hellaswag(row: dict) -> dict:
    """HellaSwag: how does a scene continue?"""

    def clean(text):
        """Without [title] and other remains of WikiHow's pages."""
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    query = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return {
        "query": clean(query),
        "choices": [clean(text) for text in row["endings"]],
        "gold": int(row["label"]),
    }


def piqa(row: dict) -> dict:
    """PIQA: which of two ways reaches a goal?"""
    return {
        "query": f"Question: {row['goal']}",
        "choices": [row["sol1"], row["sol2"]],
        "gold": int(row["label"]),
    }


LOWERED = "A An The She He It They My His Her Their".split()
POSSESSIVE = "my his her our their".split()


def winograd(row: dict) -> dict:
    """Winograd: whom does a pronoun mean? Each option takes the place of the pronoun."""
    text = row["text"].replace("  ", " ")
    start = row["pronoun_loc"]
    pronoun = row["pronoun"]
    inside_sentence = text[start - 2] != "."

    options = []
    for option in row["options"]:
        if pronoun.lower() in POSSESSIVE:
            option += "'s"
        first_word = option.split()[0]
        if inside_sentence and first_word in LOWERED:
            option = option.replace(first_word, first_word.lower())
        options.append(text[:start] + option)
    return {
        "context_options": options,
        "continuation": text[start + len(pronoun) :],
        "gold": int(row["label"]),
    }


def winogrande(row: dict) -> dict:
    """Winogrande: which of two names belongs in the gap?"""
    before, _, after = row["sentence"].partition("_")
    return {
        "context_options": [before + row["option1"], before + row["option2"]],
        "continuation": after.strip(),
        "gold": int(row["answer"]) - 1,
    }


def lambada(row: dict) -> dict:
    """LAMBADA: what is the last word of a passage?"""
    context, _, word = row["text"].rpartition(" ")
    return {"context": context, "continuation": word}


def without_passage(row: dict) -> dict:
    """lm-evaluation-harness's BoolQ."""
    return row | {"query": row["query"].removeprefix("Passage: ")}


@dataclass(frozen=True)
class Source:
    """A data set of the Hub."""

    path: str
    subset: str | None
    split: str
    row: Callable  # an original row -> a row of our format
    delimiter: str = " "  # between question and answer
    harness: Callable = lambda row: row  # a row of our format -> lm-evaluation-harness's wording


ANSWER = "\nAnswer: "
SOURCES = {
    "arc_challenge": Source("allenai/ai2_arc", "ARC-Challenge", "test", arc, ANSWER),
    "arc_easy": Source("allenai/ai2_arc", "ARC-Easy", "test", arc, ANSWER),
    "boolq": Source("aps/super_glue", "boolq", "validation", boolq, ANSWER, without_passage),
    "hellaswag": Source("Rowan/hellaswag", None, "validation", hellaswag),
    "piqa": Source("baber/piqa", None, "validation", piqa, ANSWER),
    "winograd": Source("lighteval/winograd_wsc", "wsc273", "test", winograd),
    "winogrande": Source("allenai/winogrande", "winogrande_xl", "validation", winogrande),
    "lambada": Source("EleutherAI/lambada_openai", "default", "test", lambada),
}
TABLE2 = list(SOURCES)[:7]  # the tasks of table 2 of MosaicML's MPT posts, in its order
ALIASES = {  # names of LLM Foundry's files and of lm-evaluation-harness
    "winograd_wsc": "winograd",
    "wsc273": "winograd",
    "lambada_openai": "lambada",
}


def read(name: str) -> list[dict]:
    """All rows of a task of SOURCES, in our format. UserError if the Hub cannot be reached."""
    source = SOURCES[name]
    try:
        rows = downloads.hub_dataset(source.path, source.subset, source.split)
        return [source.row(row) for row in rows]
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot get task {name} ({source.path}) from the Hub ({type(error).__name__}): give "
            f"the folder of a {name}.jsonl with --data; or run this where there is internet, copy "
            f"the folder {downloads.hub_cache()} from there to here and set HF_HUB_OFFLINE=1"
        ) from error

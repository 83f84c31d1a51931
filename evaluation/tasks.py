"""Tasks for evaluation/zero_shot.py: where the questions come from, and how they are worded.

The model does not have to speak. Each choice is put behind the question, and the likeliest one is its answer:

    multiple choice      {"query": "Question: Ice is", "choices": ["cold", "hot"], "gold": 0}
    schema               {"context_options": ["Ann thanks Joan, for Ann", ...], "continuation": "was ill.", "gold": 0}
    language modelling   {"context": "Once upon a", "continuation": "time"}     is each of its tokens the likeliest?
    a text               any .txt file: nats a token, nats a byte

One JSON object a line, one kind a file; `gold` counts from 0. LLM Foundry's wording: every string is stripped,
context = query + delimiter without trailing space, continuation = " " + choice; examples stand above, a line each. The
tasks of the Hub are worded in lm-evaluation-harness's way as well (BoolQ without "Passage: ", nothing stripped, an
empty line between examples); a local file has one wording, and both scorings use it.

Run `python -m evaluation.tasks notes.txt guess.jsonl --n=500` to make a task from any text (or from
the validation split of a folder of data.py): which of four continuations is the real one?
Read next: evaluation/score.py.
"""

import difflib
import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import config
from config import UserError, require
from storage import files
from text import corpus
from text import tokenizer as tokenizers
from text.shards import Shard

KINDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


@dataclass
class Item:
    """One question: a context and a continuation for each choice, and which choice is right."""

    contexts: list[str]
    continuations: list[str]
    gold: int

    @property
    def example(self) -> str:
        """The question with its answer, as an example for others."""
        return self.contexts[self.gold] + self.continuations[self.gold]


@dataclass
class Task:
    """A named set of items in LLM Foundry's words and in lm-evaluation-harness's; or, if kind is "text", a text."""

    name: str
    kind: str
    items: list[Item]
    harness: list[Item]
    text: str = ""

    @property
    def digest(self) -> str:
        """Equal for equal questions, examples included."""
        return hashlib.sha256(
            repr((self.kind, self.items, self.harness, self.text)).encode()
        ).hexdigest()[:16]


def load(names: str, data="", shots=0, seed=0, limit=0, delimiter="") -> list[Task]:
    """The tasks that `names` lists, with commas between: names of SOURCES, files, or `all` of the seven of Table 2.

    data: a folder of NAME.jsonl, looked into before the Hub; shots: examples above each question; limit: keep the
    first so many items (0: all). Raises UserError if a task is unknown, cannot be had or has a wrong line.
    """
    wanted = [
        name.strip()
        for part in names.split(",")
        for name in (TABLE2 if part.strip() == "all" else [part])
    ]
    tasks = [load_one(name, data, shots, seed, limit, delimiter) for name in wanted]
    found = [task.name for task in tasks]
    twice = {name for name in found if found.count(name) > 1}
    require(not twice, f"tasks={names} names {', '.join(sorted(twice))} twice: results go by name")
    return tasks


def load_one(name: str, data: str, shots: int, seed: int, limit: int, delimiter: str = "") -> Task:
    path = local_file(name, data)
    name = ALIASES.get(path.stem, path.stem) if path else ALIASES.get(name, name)
    if path and path.suffix == ".txt":
        text = path.read_text(encoding="utf-8", errors="replace")
        require(text.strip(), f"{path} is empty")
        return Task(name, "text", [], [], text)
    near = difflib.get_close_matches(name, [*SOURCES, "all"], n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"choices: all, {', '.join(SOURCES)}, or a .jsonl or .txt file"
    )
    require(path or name in SOURCES, f"unknown task {name!r}, {hint}")
    delimiter = delimiter or (SOURCES[name].delimiter if name in SOURCES else " ")
    rows = read_jsonl(path) if path else read_hub(name)
    items = with_shots([worded(row, delimiter) for row in rows], shots, "\n", seed)
    harness = items
    if not path:
        raw = [worded(SOURCES[name].harness(row), delimiter, strip=False) for row in rows]
        harness = with_shots(raw, shots, "\n\n", seed)
    return Task(
        name, kind_of(rows[0], str(path or name)), items[: limit or None], harness[: limit or None]
    )


def local_file(name: str, data: str) -> Path | None:
    """The file that a task's name means, or None if it can only be on the Hub."""
    if name.endswith((".jsonl", ".txt")):
        found = next((path for path in (Path(name), Path(data, name)) if path.is_file()), None)
        require(found, f"no file {name!r}" + (f", neither here nor in {data}" if data else ""))
        return found
    require(not data or Path(data).is_dir(), f"no folder {data!r} (--data)")
    stems = [name, *(stem for stem, other in ALIASES.items() if other == name)]
    return next(
        (path for stem in stems if data and (path := Path(data, f"{stem}.jsonl")).is_file()), None
    )


def read_jsonl(path: Path) -> list[dict]:
    """The rows of a file, checked. Raises UserError with the number of the line."""
    rows = []
    for number, line in enumerate(files.read_bytes(path).split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = files.parse_json(line, where)
        check(row, where)
        rows.append(row)
        kinds = [kind_of(r, where) for r in (rows[0], row)]
        require(
            kinds[0] == kinds[1],
            f"{where} is {kinds[1]}, but the file began with {kinds[0]}: one kind a file",
        )
    require(rows, f"{path} is empty")
    return rows


def kind_of(row: dict, where: str) -> str:
    found = [kind for kind, keys in KINDS.items() if set(keys) <= row.keys()]
    keys = "; ".join(" ".join(keys) for keys in KINDS.values())
    require(
        len(found) == 1,
        f"{where}: its keys {sorted(row)[:9]} must be those of exactly one kind, which are {keys}",
    )
    return found[0]


def check(row: dict, where: str) -> None:
    """UserError unless a row has the keys of one kind, with texts, at least two choices, and a gold among them."""
    kind = kind_of(row, where)
    listed = {"multiple_choice": "choices", "schema": "context_options"}.get(kind)
    texts = {key: [row[key]] for key in KINDS[kind] if key not in (listed, "gold")}
    if listed:
        choices, gold = row[listed], row["gold"]
        require(
            isinstance(choices, list) and len(choices) > 1,
            f"{where}: {listed} must list two or more texts",
        )
        inside = isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(choices)
        require(inside, f"{where}: gold is {files.shown(gold)}, expected 0 to {len(choices) - 1}")
        texts[listed] = choices
    for key, values in texts.items():
        require(all(isinstance(v, str) for v in values), f"{where}: {key} must be text")
        filled = key in ("query", "context") or all(
            v.strip() for v in values
        )  # nothing to go on from is allowed
        require(filled, f"{where}: {key} holds an empty text, which has no probability")


def worded(row: dict, delimiter: str, strip: bool = True) -> Item:
    """A row as contexts and continuations. strip: LLM Foundry's way; else only what the model reads as one word is
    kept together: the delimiter's trailing space goes to the continuation."""

    def clean(text):
        return text.strip() if strip else text

    if "choices" in row:
        context = clean(row["query"]) + delimiter.rstrip()
        return Item(
            [context] * len(row["choices"]), [" " + clean(c) for c in row["choices"]], row["gold"]
        )
    contexts = row.get("context_options") or [row["context"]]
    continuation = " " + clean(row["continuation"])
    return Item([clean(c) for c in contexts], [continuation] * len(contexts), row.get("gold", 0))


def with_shots(items: list[Item], shots: int, separator: str, seed: int) -> list[Item]:
    """Each item behind `shots` others with their answers: always the same ones for a seed, never the item itself."""
    if shots == 0:
        return items
    examples = list(dict.fromkeys(item.example for item in items))
    require(
        shots < len(examples),
        f"shots={shots}, but there are {len(examples)} different items: take fewer",
    )
    result = []
    for number, item in enumerate(items):
        draw, chosen = (
            random.Random(f"{seed}:{number}"),
            [],
        )  # of its methods only random() is the same for ever
        while len(chosen) < shots:
            example = examples[int(draw.random() * len(examples))]
            if example not in (*chosen, item.example):
                chosen.append(example)
        above = separator.join(chosen) + separator
        result.append(
            Item([above + context for context in item.contexts], item.continuations, item.gold)
        )
    return result


# ---------------------------------------------------------------------------------------------------------------
# The Hub: rows of the original data sets -> rows as above


def arc(row):
    gold = row["choices"]["label"].index(row["answerKey"])
    return {
        "query": f"Question: {row['question']}",
        "choices": row["choices"]["text"],
        "gold": gold,
    }


def boolq(row):
    query = f"Passage: {row['passage']}\nQuestion: {row['question']}?"
    return {"query": query, "choices": ["no", "yes"], "gold": int(row["label"])}


def hellaswag(row):
    def clean(text):  # [title] and the like are left from WikiHow's pages
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    query = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return {
        "query": clean(query),
        "choices": [clean(text) for text in row["endings"]],
        "gold": int(row["label"]),
    }


def piqa(row):
    return {
        "query": f"Question: {row['goal']}",
        "choices": [row["sol1"], row["sol2"]],
        "gold": int(row["label"]),
    }


def winograd(row):
    """The pronoun replaced by each option; 's if it owns something, lower case inside a sentence."""
    text, start, pronoun = row["text"].replace("  ", " "), row["pronoun_loc"], row["pronoun"]
    options = []
    for option in row["options"]:
        option += "'s" if pronoun.lower() in ("my", "his", "her", "our", "their") else ""
        first = option.split()[0]
        inside = text[start - 2] != "."
        if inside and first in (
            "A",
            "An",
            "The",
            "She",
            "He",
            "It",
            "They",
            "My",
            "His",
            "Her",
            "Their",
        ):
            option = option.replace(first, first.lower())
        options.append(text[:start] + option)
    return {
        "context_options": options,
        "continuation": text[start + len(pronoun) :],
        "gold": int(row["label"]),
    }


def winogrande(row):
    before, _, after = row["sentence"].partition("_")
    options = [before + row["option1"], before + row["option2"]]
    return {
        "context_options": options,
        "continuation": after.strip(),
        "gold": int(row["answer"]) - 1,
    }


def lambada(row):
    context, _, word = row["text"].rpartition(" ")
    return {"context": context, "continuation": word}


def same(row):
    return row


def without_passage(row):
    return row | {"query": row["query"].removeprefix("Passage: ")}


@dataclass(frozen=True)
class Source:
    """A data set of the Hub; row: an original row -> one of ours; harness: that one -> lm-evaluation-harness's."""

    path: str
    subset: str | None
    split: str
    row: Callable
    delimiter: str = " "
    harness: Callable = same


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
TABLE2 = list(SOURCES)[:7]  # of the MPT posts, in its order
ALIASES = {  # names of LLM Foundry's files and of lm-evaluation-harness
    "winograd_wsc": "winograd",
    "wsc273": "winograd",
    "lambada_openai": "lambada",
}


def read_hub(name: str) -> list[dict]:
    """All items of a task, from the Hugging Face Hub."""
    import datasets  # 1.5 s, so only where it is needed

    source = SOURCES[name]
    try:
        rows = [
            source.row(row)
            for row in datasets.load_dataset(source.path, source.subset, split=source.split)
        ]
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot get task {name} ({source.path}) from the Hub ({type(error).__name__}): give the folder of a "
            f"{name}.jsonl by --data, or try again online"
        ) from error
    for number, row in enumerate(rows):
        check(row, f"{source.path}, item {number}")
    return rows


# ---------------------------------------------------------------------------------------------------------------
# A task from any text


@dataclass
class MakeConfig:
    """A task from a text: which continuation is the real one?"""

    n: int = 500  # items
    seed: int = 0  # of the places that are drawn
    choices: int = 4  # the real continuation, and others from elsewhere in the text
    context: int = 256  # characters before the place
    length: int = 64  # characters of a continuation, at most

    def check(self) -> None:
        for name, least in {"n": 1, "choices": 2, "context": 0, "length": 1}.items():
            require(
                getattr(self, name) >= least,
                f"{name} must be at least {least}, not {getattr(self, name)}",
            )


def continuations(
    text: str, n: int, seed: int = 0, choices: int = 4, context: int = 256, length: int = 64
):
    """n rows of multiple choice: `context` characters of the text, then what really follows or what follows elsewhere.

    All begin behind a single space, so that nothing but the sense tells them apart. Raises UserError if the text is too
    short.
    """
    places = [m.start() for m in re.finditer(r"(?<=\S) (?=\S)", text)]
    places = [place for place in places if context <= place < len(text) - length]
    pieces = {text[place : place + length].strip() for place in places}
    require(
        len(pieces) >= choices,
        f"the text has {len(text)} characters: too few for {choices} different choices",
    )
    draw, rows = random.Random(seed), []
    for _ in range(n):
        found = {}  # continuation -> its place; the first is the real one
        while len(found) < choices:
            place = places[int(draw.random() * len(places))]
            found.setdefault(text[place : place + length].strip(), place)
        (real, place), *_ = found.items()
        shuffled = sorted(found, key=lambda _: draw.random())
        rows.append(
            {
                "query": text[place - context : place],
                "choices": shuffled,
                "gold": shuffled.index(real),
            }
        )
    return rows


def text_of(source: str) -> str:
    """The text of a .txt, .jsonl, .parquet or .py file, or of the validation split in a folder of data.py."""
    made = Path(source, "dataset.json")
    if not made.is_file():
        return "\n\n".join(corpus.file_documents(source)) if Path(source).is_file() else ""
    tokenizer = tokenizers.load(
        files.read_json(made, dict, {"tokenizer": str})["tokenizer"], Path(source, "tokenizer.json")
    )
    ids = (Shard(path).ids for path in sorted(Path(source).glob("val-*.bin")))
    return "".join(tokenizer.decode(part) for part in ids).replace(tokenizers.END_OF_TEXT, "\n\n")


def main(argv: list[str]) -> None:
    (source, out), made = config.load(argv, MakeConfig, takes="TEXT OUT.jsonl")
    text = text_of(source)
    require(text.strip(), f"no text in {source!r}: give a file of text or a folder of data.py")
    rows = continuations(text, made.n, made.seed, made.choices, made.context, made.length)
    files.write_atomically(Path(out), "".join(json.dumps(row) + "\n" for row in rows).encode())
    first = rows[0]["query"][-50:]
    print(f"{out}: {len(rows)} questions with {made.choices} choices; the first is about {first!r}")


if __name__ == "__main__":
    config.run(main)

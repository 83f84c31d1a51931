"""Tasks: questions in files or on the Hub, and how they are worded for a language model.

The model need not be able to chat. Each choice is appended to the question, and the likeliest one
is the model's answer:

    multiple choice     {"query": "Question: Ice is", "choices": ["cold", "hot"], "gold": 0}
    schema              {"context_options": ["Ann thanks Joan, for Ann", ...],
                         "continuation": "was ill.", "gold": 0}
    language modelling  {"context": "Once upon a", "continuation": "time"}
                        is each token of the continuation the likeliest?
    text                any .txt file: nats per token, nats per byte

A .jsonl file has one JSON object per line, all of one kind. `gold` counts from 0.

The wording is LLM Foundry's: every string is stripped, the delimiter comes between context and
continuation, and a newline follows each few-shot example. A space that ends the delimiter belongs
to the continuation. Tasks of the Hub also get lm-evaluation-harness's wording: nothing is stripped,
and an empty line separates examples. A local file has one wording, which all scoring rules use.

Run `python -m evaluation.tasks notes.txt guess.jsonl --n=500` to make a task from any text (or from
the validation split of a folder that data.py made): which of four continuations is the real one?
"""

import hashlib
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import config
import program
from config import Int
from evaluation import hub
from evaluation.hub import ALIASES, SOURCES, TABLE2
from launch import parser
from program import require
from storage import files
from text import corpus
from text import tokenizer as tokenizers
from text.shards import Shard

KINDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}
LISTS = {"multiple_choice": "choices", "schema": "context_options"}  # the key that lists choices


@dataclass
class Item:
    """One question: a context and a continuation for each choice, and which choice is right."""

    contexts: list[str]
    continuations: list[str]
    gold: int

    @property
    def example(self) -> str:
        """The question with its answer, as an example above other questions."""
        return self.contexts[self.gold] + self.continuations[self.gold]


@dataclass
class Task:
    """A named set of items in LLM Foundry's wording and in lm-evaluation-harness's.

    Or, if the kind is "text", a text.
    """

    name: str
    kind: str
    items: list[Item]
    harness: list[Item]
    text: str = ""

    @property
    def digest(self) -> str:
        """A short hash: equal for equal questions and examples."""
        content = (self.kind, self.items, self.harness, self.text)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------
# Loading


def load(names: str, data="", shots=0, seed=0, limit=0, delimiter="") -> list[Task]:
    """The tasks that `names` lists, with commas between.

    A name is one of SOURCES, a file, or `all` for the seven of Table 2. The other arguments are
    those of zero_shot.EvalConfig. Raises UserError if a task is unknown, cannot be read or has a
    wrong line, and for shots or a delimiter where there are no questions.
    """
    wanted = []
    for name in names.split(","):
        wanted += TABLE2 if name.strip() == "all" else [name.strip()]
    tasks = [load_one(name, data, shots, seed, limit, delimiter) for name in wanted]

    loaded = [task.name for task in tasks]
    twice = sorted({name for name in loaded if loaded.count(name) > 1})
    require(not twice, f"tasks={names} names {', '.join(twice)} twice: results are kept by name")
    are_texts = all(task.kind == "text" for task in tasks)
    for name, value in {"shots": shots, "delimiter": delimiter}.items():
        require(not (are_texts and value), f"{name} sets nothing for plain text: remove it")
    return tasks


def load_one(name: str, data: str, shots: int, seed: int, limit: int, delimiter: str = "") -> Task:
    """One task of `load`."""
    path = local_file(name, data)
    name = path.stem if path else name
    name = ALIASES.get(name, name)
    if path and path.suffix.lower() == ".txt":
        text = corpus.read_text(path)
        require(text.strip(), f"{path} is empty")
        return Task(name, "text", [], [], text)
    if path:
        rows = read_jsonl(path)
    else:
        require_known(name)
        rows = hub.read(name)
        for number, row in enumerate(rows):
            check(row, f"{SOURCES[name].path}, item {number}")
    if not delimiter:
        delimiter = SOURCES[name].delimiter if name in SOURCES else " "
    items = [worded(row, delimiter) for row in rows]
    items = with_shots(items, shots, "\n", seed)
    harness = items
    if not path:
        harness = [worded(SOURCES[name].harness(row), delimiter, strip=False) for row in rows]
        harness = with_shots(harness, shots, "\n\n", seed)

    kind = kind_of(rows[0], str(path or name))
    most = limit or None
    return Task(name, kind, items[:most], harness[:most])


def require_known(name: str) -> None:
    """UserError with a hint unless the Hub has a task of this name."""
    nearest = parser.nearest_name(name, [*SOURCES, "all"])
    choices = f"choices: all, {', '.join(SOURCES)}, or a .jsonl or .txt file"
    hint = f"did you mean {nearest!r}?" if nearest else choices
    require(name in SOURCES, f"unknown task {name!r}, {hint}")


def local_file(name: str, data: str) -> Path | None:
    """The file that a task's name means, or None if it can only be on the Hub."""
    if name.lower().endswith((".jsonl", ".txt")):
        where = f", neither here nor in {data}" if data else ""
        for path in (Path(name), Path(data, name)):
            if path.is_file():
                return path
        require(False, f"no file {name!r}{where}")
    if not data:
        return None
    require(Path(data).is_dir(), f"no folder {data!r} (--data)")
    for stem in [name, *(alias for alias, target in ALIASES.items() if target == name)]:
        path = Path(data, f"{stem}.jsonl")
        if path.is_file():
            return path
    return None


def read_jsonl(path: Path) -> list[dict]:
    """The rows of a file, checked. Raises UserError with the number of the line."""
    rows = []
    for number, line in enumerate(corpus.text_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = files.parse_json(line.encode(), where)
        check(row, where)
        rows.append(row)
        first_kind = kind_of(rows[0], where)
        kind = kind_of(row, where)
        require(
            kind == first_kind,
            f"{where} is {kind}, but the file began with {first_kind}: one kind per file",
        )
    require(rows, f"{path} is empty")
    return rows


def kind_of(row: dict, where: str) -> str:
    """The kind whose keys a row has. UserError unless it is exactly one."""
    kinds = [kind for kind, keys in KINDS.items() if set(keys) <= row.keys()]
    expected = "; ".join(" ".join(keys) for keys in KINDS.values())
    require(
        len(kinds) == 1,
        f"{where}: its keys {sorted(row)[:9]} must be those of exactly one kind, "
        f"which are {expected}",
    )
    return kinds[0]


def check(row: dict, where: str) -> None:
    """UserError unless a row has texts, at least two choices, and a gold that is one of them."""
    kind = kind_of(row, where)
    listed = LISTS.get(kind)
    texts = {key: [row[key]] for key in KINDS[kind] if key not in (listed, "gold")}
    if listed:
        choices = row[listed]
        is_list = isinstance(choices, list) and len(choices) > 1
        require(is_list, f"{where}: {listed} must list two or more texts")
        gold = row["gold"]
        is_index = isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(choices)
        require(is_index, f"{where}: gold is {files.shown(gold)}, expected 0 to {len(choices) - 1}")
        texts[listed] = choices

    for key, values in texts.items():
        require(all(isinstance(v, str) for v in values), f"{where}: {key} must be text")
        may_be_empty = key in ("query", "context")
        filled = may_be_empty or all(v.strip() for v in values)
        require(filled, f"{where}: {key} holds an empty text, which has no probability")


# --------------------------------------------------------------------------------------------------
# Wording


def worded(row: dict, delimiter: str, strip: bool = True) -> Item:
    """A row as contexts and continuations.

    The delimiter's trailing space moves to the continuation, since tokens begin with their space.
    strip: LLM Foundry's way, all texts of the row are stripped.
    """
    bare = delimiter.rstrip(" ")
    space = delimiter[len(bare) :]

    def clean(text):
        return text.strip() if strip else text

    if "choices" in row:
        continuations = [space + clean(choice) for choice in row["choices"]]
        contexts = [clean(row["query"]) + bare] * len(continuations)
    else:
        options = row.get("context_options") or [row["context"]]
        contexts = [clean(text) + bare for text in options]
        continuations = [space + clean(row["continuation"])] * len(contexts)
    return Item(contexts, continuations, row.get("gold", 0))


def with_shots(items: list[Item], shots: int, separator: str, seed: int) -> list[Item]:
    """Each item below `shots` others with their answers, drawn by seed and number of the item."""
    if shots == 0:
        return items
    examples = list(dict.fromkeys(item.example for item in items))
    require(
        shots < len(examples),
        f"shots={shots}, but there are {len(examples)} different items: take fewer",
    )
    result = []
    for number, item in enumerate(items):
        # Of its methods, only random() gives the same numbers in all versions of Python.
        draw = random.Random(f"{seed}:{number}")
        chosen = []
        while len(chosen) < shots:
            example = examples[int(draw.random() * len(examples))]
            if example not in (*chosen, item.example):
                chosen.append(example)
        above = separator.join(chosen) + separator
        contexts = [above + context for context in item.contexts]
        result.append(Item(contexts, item.continuations, item.gold))
    return result


# --------------------------------------------------------------------------------------------------
# A task from any text


@dataclass
class MakeConfig:
    """A task from a text: which continuation is the real one?"""

    n: Int[1, 10**9] = 500  # items
    seed: Int[0, 10**18] = 0  # of the positions in the text
    choices: Int[2, 10**6] = 4  # the real continuation, and others from elsewhere in the text
    context: Int[0, 2**24] = 256  # characters before the position
    length: Int[1, 10**9] = 64  # characters of a continuation, at most


def continuations(text: str, cfg: MakeConfig) -> list[dict]:
    """Rows of multiple choice: some characters of a text, and what comes next.

    One choice is what really comes next; the others are from elsewhere in the text. All begin
    after a single space, so that only the meaning distinguishes them. Raises UserError if the text
    is too short.
    """
    spaces = [match.start() for match in re.finditer(r"(?<=\S) (?=\S)", text)]
    positions = [space for space in spaces if cfg.context <= space < len(text) - cfg.length]
    pieces = {text[position : position + cfg.length].strip() for position in positions}
    require(
        len(pieces) >= cfg.choices,
        f"the text has {len(text)} characters: too few for {cfg.choices} different choices",
    )

    draw = random.Random(cfg.seed)
    rows = []
    for _ in range(cfg.n):
        position_of = {}  # of each choice; the first one is the real one
        while len(position_of) < cfg.choices:
            position = positions[int(draw.random() * len(positions))]
            piece = text[position : position + cfg.length].strip()
            position_of.setdefault(piece, position)
        real, position = next(iter(position_of.items()))
        shuffled = sorted(position_of, key=lambda _: draw.random())
        query = text[position - cfg.context : position]
        rows.append({"query": query, "choices": shuffled, "gold": shuffled.index(real)})
    return rows


def text_of(source: str) -> str:
    """The text of a file, or of the validation split of a prepared data set; else empty."""
    description = Path(source, "dataset.json")
    if description.is_file():
        name = files.read_json(description, dict, {"tokenizer": str})["tokenizer"]
        tokenizer = tokenizers.load(name, Path(source, "tokenizer.json"))
        # One at a time: each open shard holds a file descriptor.
        paths = sorted(Path(source).glob("val-*.bin"))
        text = "".join(tokenizer.decode(Shard(path).ids) for path in paths)
        return text.replace(tokenizers.END_OF_TEXT, "\n\n")
    if Path(source).is_file():
        return "\n\n".join(corpus.file_documents(source))
    return ""


def main(argv: list[str]) -> None:
    """Make a task from a text."""
    (source, out), cfg = config.load(argv, MakeConfig, takes="TEXT OUT.jsonl")
    text = text_of(source)
    require(
        text.strip(),
        f"no text in {source!r}: give a file of text or a folder that data.py prepared",
    )
    rows = continuations(text, cfg)
    content = "".join(json.dumps(row) + "\n" for row in rows)
    files.write_atomically(Path(out), content.encode())
    first = rows[0]["query"][-50:]
    print(f"{out}: {len(rows)} questions with {cfg.choices} choices; the first ends with {first!r}")


if __name__ == "__main__":
    program.run(main)

"""Prompts and responses: lines of a .jsonl file -> turns -> ids, of which only some are learned.

A line is one example, in one of two forms (LLM Foundry's and OpenAI's):

    {"prompt": "...", "response": "..."}                    or "completion"
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Messages become text by a chat template, ChatML unless another one is named. Then each turn has a
part that the model reads and a part that it learns to write:

    read      <|im_start|>user\\nWhat is 2+2?<|im_end|>\\n<|im_start|>assistant\\n
    learned   4<|im_end|>\\n<|endoftext|>

The parts are tokenized one by one and joined with nothing between; end-of-text follows the last
one. (Tokenized as one text, a prompt could end inside a token.) A marker that the template writes,
such as <|im_start|>, is one id if it is a special token of the tokenizer, and text if it is not. In
a prompt, a response or a message it is text, so that nobody can fake a turn.

An id that is read but not learned is stored as ~id = -1 - id. So a shard needs no separate mask:
`data.inputs_and_labels` takes the two apart again.

The first id of an example is never learned: nothing is before it. What is longer than a row is cut
off at the end, as LLM Foundry does. An example with nothing left to learn is dropped.

Run `python -m text.chat my/chat.jsonl` to check all lines of a file and see its first example as
it will be learned, or `python -m text.chat` for one of ours. Both take bytes for tokens unless you
set --tokenizer.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path

import jinja2  # torch requires it
import jinja2.ext
import jinja2.sandbox
import numpy as np

import config
import program
from config import TrainConfig
from program import UserError, require
from storage import files
from storage.files import shown
from text import corpus
from text import tokenizer as tokenizers
from text.packing import fill_rows, pack
from text.tokenizer import END_OF_TEXT, SpecialToken

ROLES = ("system", "user", "assistant", "tool")
RESPONSES = ("response", "completion")
MESSAGE_KEYS = ("role", "content", "weight")
MOST_FAULTS = 20  # bad lines that one message names
SAFE_JINJA = [3, 1, 6]  # in older versions a template can leave the sandbox

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SAMPLE = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "6"},
]

WITH_EACH_ROLE = [
    ("user", "assistant"),
    ("system", "user", "assistant"),
    ("user", "assistant", "tool"),
]

# --------------------------------------------------------------------------------------------------
# Lines -> turns


@dataclass(frozen=True)
class Turn:
    """What the model reads, then what it may learn to write.

    read, written: a special token in them is the template's own; one in a prompt, a response or a
    message is marked as text (`tokenizer.spelled_out`).
    learn: 1 or 0 if the file says so (`weight`), None if the settings decide.
    """

    read: str
    written: str
    learn: int | None = None


def examples(dataset: str, template: "Template"):
    """The examples of a data set, each as the JSON of its turns, so that chunks and hashes of text
    work for it unchanged. `turns_from` reads it.

    Raises one UserError for all lines that cannot be used, with file, line and reason of the first
    20. The examples before the first bad line have been yielded by then.
    """
    faults = []
    for place, row in corpus.rows(dataset):
        try:
            turns = turns_of(corpus.parsed(row), template)
        except UserError as error:
            faults.append(f"{place}: {error}")
            if len(faults) > MOST_FAULTS:
                break
            continue
        if not faults:
            yield json.dumps([[turn.read, turn.written, turn.learn] for turn in turns])

    if len(faults) > MOST_FAULTS:
        faults[MOST_FAULTS:] = ["and more"]
    require(not faults, f"examples that cannot be used: {'; '.join(faults)}")


def turns_from(example: str) -> list[Turn]:
    """The turns of an example as `examples` yields it."""
    return [Turn(*parts) for parts in json.loads(example)]


def plain_text(example: str) -> str:
    """All text of an example, from which a tokenizer can learn."""
    text = "".join(turn.read + turn.written for turn in turns_from(example))
    return text.replace(tokenizers.MARK, "")


def turns_of(row, template: "Template") -> list[Turn]:
    """The turns of one line, of which `row` is the JSON. UserError says what is wrong with it.

    Unknown keys of a line (an id, a source) are ignored, since the Hub's data sets have many; those
    of a message are refused. A value null counts as a key that is not there.
    """
    require(isinstance(row, dict), "it is not a JSON object")
    row = {key: value for key, value in row.items() if value is not None}
    for key in ("tools", "functions"):
        require(not row.get(key), f"it has {key}, which are not supported")
    if "messages" in row:
        require("weight" not in row, "it has a weight, which belongs to a message")
        # A prompt alone may stay: data sets of the Hub repeat the first message there.
        for key in RESPONSES:
            require(key not in row, f"it has messages and {key}: remove one of them")
        return turns_of_messages(row["messages"], template)

    found = [key for key in RESPONSES if key in row]
    keys = ", ".join(map(shown, sorted(row)[:10])) or "nothing"
    require(
        "prompt" in row and len(found) == 1,
        f"it has {keys}; expected prompt and one of response or completion, or messages",
    )
    for key in ("prompt", *found):
        require(isinstance(row[key], str), f"{key} is {shown(row[key])}, expected text")
    check_weight(row, "it")
    read, written = (template.spelled_out(row[key]) for key in ("prompt", found[0]))
    return [Turn(read, written, row.get("weight"))]


def turns_of_messages(messages, template: "Template") -> list[Turn]:
    """One turn for each message of the assistant. UserError says what is wrong."""
    messages = checked_messages(messages)
    texts = [
        {"role": message["role"], "content": template.spelled_out(message["content"])}
        for message in messages
    ]
    turns = []
    so_far = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = template.text(texts[:number], add_generation_prompt=True)
        answered = template.text(texts[: number + 1])
        require(
            asked.startswith(so_far) and answered.startswith(asked),
            "chat_template writes the turns before an answer differently, or its words with "
            f"add_generation_prompt ({asked[-40:]!r}) are not those with which an answer begins: "
            "give --chat_template a file in which each turn only adds to the text before it",
        )
        written = answered[len(asked) :]
        turns.append(Turn(asked[len(so_far) :], written, message.get("weight")))
        so_far = answered
    return turns


def checked_messages(messages, last: tuple[str, ...] = ("assistant",)) -> list[dict]:
    """The messages without values that are null. UserError if they are no conversation.

    The first is the system's or the user's. No role but `tool` follows itself, and `system` comes
    first or not at all. last: whose the last one may be.
    """
    require(isinstance(messages, list) and messages, "messages is not a list of messages")
    checked = []
    before = None
    for number, message in enumerate(messages, 1):
        name = f"message {number}"
        require(isinstance(message, dict), f"{name} is not an object with role and content")
        message = {key: value for key, value in message.items() if value is not None}
        check_message(message, name)

        role = message["role"]
        is_first_role = role in ("system", "user")
        require(before or is_first_role, f"{name} is of {role}, expected system or user first")
        repeats = role == before and role != "tool"
        require(not repeats, f"{name} is of {role} again: roles must alternate")
        is_late = role == "system" and before
        require(not is_late, f"{name} is of system, which can only be the first")
        checked.append(message)
        before = role
    require(before in last, f"the last message is of {before}, expected {' or '.join(last)}")
    return checked


def check_message(message: dict, name: str) -> None:
    """UserError unless a message has a known role, text and nothing that would be lost."""
    for key in message:
        require(key in MESSAGE_KEYS, f"{name} has {shown(key)}, which is not supported")
    role = message.get("role")
    require(role in ROLES, f"{name} has role {shown(role)}, expected {', '.join(ROLES)}")
    content = message.get("content")
    require(isinstance(content, str), f"{name} has content {shown(content)}, expected text")
    check_weight(message, name)
    require(
        role == "assistant" or "weight" not in message,
        f"{name} is of {role}: a weight belongs to a message of the assistant: remove it",
    )


def check_weight(values: dict, name: str) -> None:
    """UserError if there is a weight that is not 0 or 1."""
    weight = values.get("weight", 1)
    valid = weight in (0, 1) and not isinstance(weight, bool)
    require(valid, f"{name} has weight {shown(weight)}, expected 0 or 1")


# --------------------------------------------------------------------------------------------------
# Templates


class Missing(jinja2.Undefined):
    """What is not defined: false in a test, and an error where a template would write it.

    Jinja's own writes nothing, so a misspelled name would go unnoticed in each example.
    """

    def __str__(self) -> str:
        if self._undefined_name is None:  # {{ 'x' if ask }}, or the message before the first one
            return ""
        self._fail_with_undefined_error()


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, which say what the assistant wrote: unchanged."""

    tags = {"generation"}

    def parse(self, parser):
        """The block, in which a template may set variables of its own."""
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line_number)


def environment() -> jinja2.Environment:
    """Jinja as transformers sets it up: a sandbox, which shows a template the messages alone."""
    found = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=Missing,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = refuse
    today = "strftime_now would write another date every day: write a fixed date in its place"
    found.globals["strftime_now"] = jinja2.Undefined(today)
    return found


def refuse(reason: str) -> None:
    """What a template calls to refuse a conversation."""
    raise ValueError(reason)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """The filter as transformers defines it: Jinja's own writes < and & as for HTML."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if not ensure_ascii:
        return text
    not_ascii = rf"[^\x00-\x7e{tokenizers.MARK}]"  # JSON in ASCII spells out DEL, too
    return re.sub(not_ascii, lambda match: json.dumps(match[0])[1:-1], text)


class Template:
    """A chat template: messages -> text. It is Jinja, with what transformers adds to it.

    Templates come with models from other people: none of their code runs, but one that was made to
    harm can take much time and memory. The date of today is refused (`strftime_now`), and a
    template that asks whether it is there writes a date of its own.

    reserved    the names of tokens that no message may write
    """

    def __init__(
        self,
        source: str,
        name: str,
        special_tokens: dict[str, str] | None = None,
        reserved: dict[str, SpecialToken] | None = None,
    ):
        """source: the template. name: for messages. special_tokens: such as eos_token, which the
        template may write. reserved: the tokenizer's `special_tokens`.

        Raises UserError if it is no template, or writes end-of-text between turns.
        """
        self.source = source
        self.name = name
        self.special_tokens = special_tokens or {}
        self.reserved = [END_OF_TEXT]
        if source != CHATML:  # ours
            require_safe_jinja(name)
        with self.failing("is not a template"):
            self.template = environment().from_string(source)
        self.text(SAMPLE)
        if reserved:
            self.reserved = self.markers_of(reserved)

    @contextlib.contextmanager
    def failing(self, how: str):
        """UserError for whatever a template raises, or Python's compiler, which compiles it."""
        try:
            yield
        except Exception as error:
            reason = program.one_line(error).replace(tokenizers.MARK, "") or type(error).__name__
            raise UserError(f"{self.name} {how}: {reason}") from error

    def markers_of(self, tokens: dict[str, SpecialToken]) -> list[str]:
        """Special tokens, and the other added ones that the template writes, such as [INST].

        UserError for one that other words can spell: content could fake a conversation's turns.
        """
        others = {name: token for name, token in tokens.items() if not token.special}
        written = ""
        for roles in WITH_EACH_ROLE if others else ():
            messages = [{"role": role, "content": ""} for role in roles]
            with contextlib.suppress(UserError):  # not every template takes every role
                written += self.text(messages, add_generation_prompt=True)
        # Branches that were not taken may write it, too. Plain words may be names of variables.
        in_source = {name for name in others if name in self.source and not name.isalnum()}
        used = in_source | {name for name in others if name in written}
        for name in used:
            require(
                others[name].exact,
                f"{self.name} writes {name}, which other words can spell as well: "
                'set its "special" to true in tokenizer.json',
            )
        return [name for name in tokens if name in used or name not in others]

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of the SHA-256 of all that determines the text of messages."""
        tokens = {name: text for name, text in self.special_tokens.items() if text}
        content = json.dumps([self.source, tokens], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def spelled_out(self, content: str) -> str:
        """The content of a message, in which no special token counts as one."""
        return tokenizers.spelled_out(content, self.reserved)

    def text(self, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """The messages as text, without end-of-text around them, which is an id and no text.

        messages: their content as `spelled_out` returns it, unless it is known.
        add_generation_prompt: end with what precedes an answer. UserError if the template fails, or
        writes end-of-text where the conversation goes on: here that id ends a text, and what comes
        after it sees nothing of what was before.
        """
        with self.failing("fails"):
            text = self.template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        text = text.removeprefix(END_OF_TEXT).removesuffix(END_OF_TEXT)
        require(
            END_OF_TEXT not in text,
            f"{self.name} writes {END_OF_TEXT} between turns: "
            "give --chat_template a file without it",
        )
        return text

    def end_of_answer(self) -> str:
        """What the template writes behind an answer, such as <|im_end|>; empty for nothing."""
        question, answer = SAMPLE[:2]
        asked = self.text([question], add_generation_prompt=True)
        answered = self.text([question, answer])
        return answered.removeprefix(asked).removeprefix(answer["content"]).strip()


def require_safe_jinja(name: str) -> None:
    """UserError if the sandbox of the installed Jinja2 has holes. name: of the template."""
    installed = importlib.metadata.version("jinja2")
    require(
        [int(number) for number in re.findall(r"\d+", installed)] >= SAFE_JINJA,
        f"{name} needs Jinja2 3.1.6 or later (in version {installed} a template can run any code): "
        "pip install 'jinja2>=3.1.6'",
    )


def load_template(path: str, reserved: dict[str, SpecialToken] | None = None) -> Template:
    """The chat template at a path: ChatML if it is empty. reserved: as for `Template`.

    path: a folder with a Hugging Face tokenizer, its tokenizer_config.json, or a file that is a
    template. In each case the tokenizer_config.json there names eos_token and others. UserError if
    there is none.
    """
    if not path:
        return Template(CHATML, "ChatML", reserved=reserved)
    given = Path(path)
    require(given.exists(), f"chat_template={path!r}: there is no such file or folder")
    if given.is_dir():
        alone = given / "chat_template.jinja"  # newer versions of transformers save it there
        given = alone if alone.exists() else given / "tokenizer_config.json"

    settings = given.with_name("tokenizer_config.json")
    saved = files.read_json(settings) if settings.exists() else {}
    if given.suffix == ".json":
        is_there = given.exists()
        source = default_of(files.read_json(given).get("chat_template")) if is_there else None
        require(source, f"{given} has no chat_template")
    else:
        source = corpus.decoded(files.read_bytes(given, files.MAX_JSON), str(given))
    return Template(source, f"chat_template {path}", special_tokens_of(saved), reserved)


def default_of(templates) -> str | None:
    """The template in tokenizer_config.json. It may have several, of which one is the default."""
    if isinstance(templates, list):
        named = [item for item in templates if isinstance(item, dict)]
        templates = {item.get("name"): item.get("template") for item in named}.get("default")
    return templates if isinstance(templates, str) else None


def special_tokens_of(saved: dict) -> dict[str, str]:
    """bos_token, eos_token and others of tokenizer_config.json, as text; "" for null."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = saved.get(name, 0)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str | None):
            tokens[name] = text or ""
    return tokens


# --------------------------------------------------------------------------------------------------
# Turns -> ids -> rows


@dataclass(frozen=True)
class RowFormat:
    """How examples become rows. See the settings of the same names in config.py."""

    max_seq_len: int
    packing: bool
    target_prompts: str
    target_responses: str

    @classmethod
    def of(cls, cfg: TrainConfig, max_seq_len: int) -> "RowFormat":
        """What a run asks for. Raises UserError if that is not possible."""
        require(
            re.fullmatch(r"none|all|length>=[0-9]{1,9}", cfg.target_prompts),
            f"target_prompts is {shown(cfg.target_prompts)}, expected none, all, or length>=N "
            "as in length>=100",
        )
        require(
            not cfg.max_tokens,
            f"max_tokens {cfg.max_tokens:,} would cut examples: data_format=chat needs "
            "--max_tokens=0",
        )
        return cls(max_seq_len, cfg.packing, cfg.target_prompts, cfg.target_responses)

    def learns_prompt(self, n_tokens: int) -> bool:
        """Is a prompt of so many tokens learned?"""
        if self.target_prompts.startswith("length>="):
            return n_tokens >= int(self.target_prompts.removeprefix("length>="))
        return self.target_prompts == "all"


def encode(turns: list[Turn], tokenizer, row_format: RowFormat) -> np.ndarray:
    """The ids of an example, (n,) int32, end-of-text behind; ~id where an id is not learned."""
    parts = []
    for number, turn in enumerate(turns, 1):
        is_last = number == len(turns)
        read = tokenizer.encode_special(turn.read).astype(np.int32)
        written = tokenizer.encode_special(turn.written).astype(np.int32)
        if is_last:
            written = np.append(written, np.int32(tokenizer.eot))
        parts.append(read if row_format.learns_prompt(len(read)) else ~read)
        learns = is_last or row_format.target_responses == "all"
        if turn.learn is not None:
            learns = turn.learn == 1
        parts.append(written if learns else ~written)
    ids = np.concatenate(parts)
    ids[0] = min(ids[0], ~ids[0])  # there is nothing before it that could predict it
    return ids


def make_rows(texts: list[str], tokenizer, row_format: RowFormat) -> tuple[np.ndarray, dict]:
    """Examples, as `examples` yields them -> the ids of a shard, and what its header says.

    The ids are (n * max_seq_len + 1,) int32, or an empty array if nothing is learned.
    """
    room = row_format.max_seq_len
    whole = [encode(turns_from(text), tokenizer, row_format) for text in texts]
    kept = [ids[:room] for ids in whole if (ids[:room] >= 0).any()]
    lengths = [len(ids) for ids in kept]
    alone = [[number] for number in range(len(kept))]
    members = pack(lengths, room) if row_format.packing else alone

    ids = np.empty(0, np.int32)
    if kept:
        ids = fill_rows(kept, members, room, filler=~tokenizer.eot)
    learned = ids[ids >= 0]
    about = {
        "documents": len(kept),
        "text_bytes": max(1, bytes_of(learned, tokenizer)),  # 1: only end-of-text is learned
        "vocab_size": tokenizer.vocab_size,
        "max_seq_len": room,
        "learned": len(learned),
        "filled": sum(lengths),
        "cut": sum(len(ids) > room and (ids[:room] >= 0).any() for ids in whole),
        "dropped": len(whole) - len(kept),
    }
    return ids, {key: int(value) for key, value in about.items()}


def bytes_of(ids: np.ndarray, tokenizer) -> int:
    """The bytes of text that these ids stand for. End-of-text stands for none."""
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    for token_id, spelling in tokenizer.bytes_of.items():
        lengths[token_id] = len(spelling)
    lengths[tokenizer.eot] = 0
    return int(lengths[ids].sum())


def main(argv) -> None:
    """Show the first example of a data set as text and as ids, with what is learned of it."""
    # GPT-2's tokens, the default of a run, would need the network.
    defaults = ["--data_format=chat", "--tokenizer=bytes"]
    words, cfg = config.load([*defaults, *argv], TrainConfig, takes="[FILE]")
    tokenizer_file = Path(cfg.data_dir) / "tokenizer.json" if cfg.data_dir else None
    tokenizer = tokenizers.load(cfg.tokenizer, tokenizer_file)
    template = load_template(cfg.chat_template, tokenizer.special_tokens)
    turns = turns_of_messages(SAMPLE, template)
    n_examples = 1
    if words:
        all_examples = examples(words[0], template)
        first = next(all_examples, None)
        require(first, f"{words[0]} has no example")
        turns = turns_from(first)
        n_examples += sum(1 for _ in all_examples)  # this checks every line

    ids = encode(turns, tokenizer, RowFormat.of(cfg, max_seq_len=0))  # whole: rows would cut it
    changes = np.flatnonzero(np.diff(ids >= 0)) + 1
    for part in np.split(ids, changes):
        label = "learned" if part[0] >= 0 else "read"
        ids_of_part = np.maximum(part, ~part)
        print(f"{label:8s} {tokenizer.decode(ids_of_part)!r}\n{'':8s}", *ids_of_part)
    learned = (ids >= 0).sum()
    print(f"{n_examples:,} examples; the first has {len(ids):,} tokens, {learned:,} learned")


if __name__ == "__main__":
    program.run(main)

"""The tokenizer of a Hugging Face folder, and the ids that end its texts.

    in the folder                       the tokenizer
    tokenizer.json                      this file; if `export` wrote it for a tokenizer of this
                                        project, that one
    vocab.json and merges.txt           both of them (text/tokenizer_json.py)
    tokenizer.model, vocab.txt, ...     refused by name
    none of these                       what config.json names, or else gpt2

Beside it are the names of special tokens, a chat template, and how text is generated: `import_`
keeps these files in the folder `hugging_face` of a run, and `export` writes them again. The
eos_token_id of generation_config.json, or else of config.json, ends our texts, too.

transformers builds a tokenizer of its own kind from a folder without tokenizer_config.json. So
`export` always writes one, which says that tokenizer.json holds the whole tokenizer.
"""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path

import checkpoint
import program
from program import UserError, require, say_once
from storage import files
from storage.files import require_no_link, shown
from text import sources, tokenizer_json
from text import tokenizer as tokenizers
from text.tokenizer_json import MERGES, VOCABULARY, read_if_there
from weights.hf_config import foreign_settings
from weights.tensor_files import nested, read_pickle

TOKENIZER = "tokenizer.json"  # in Hugging Face's format
BPE_TOKENIZER = "bpe_tokenizer.json"  # a bpe-N of this project
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
BESIDE = (SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
KEPT = "hugging_face"  # the folder in a run
OTHER_FORMATS = ("tokenizer.model", "spiece.model", "vocab.txt", VOCABULARY, MERGES)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# The SHA-256 of the tokenizer.json that `export` writes for gpt2.
GPT2 = "530c13f6c6277bba9a9d80c77dc15a1671ebe55fb5d573942e19c8bf19f23d80"

# --------------------------------------------------------------------------------------------------
# Which one


def folder_of(source: Path) -> Path:
    """The folder itself, or that of a Composer file."""
    return source if source.is_dir() else source.parent


def name_of(source: Path) -> str:
    """The tokenizer of a foreign folder or file, as `tokenizers.load` takes it.

    Raises UserError if it has one that this project cannot read: gpt2 is only for a folder that
    says nothing else.
    """
    folder = folder_of(source)
    settings = foreign_settings(source)[0]
    named = str(settings.get("tokenizer_name") or "")
    if (folder / TOKENIZER).exists():
        return named if is_ours(named, folder) else str(folder / TOKENIZER)
    if (folder / VOCABULARY).exists() and (folder / MERGES).exists():
        pair = f"{VOCABULARY} and {MERGES}"
        say_once("note", f"{folder} has no {TOKENIZER}: its tokenizer is made of {pair}")
        return str(folder / VOCABULARY)
    problem = why_unreadable(source, settings, named)
    fix = "--tokenizer=gpt2 would load, but its ids stand for other words in this model"
    require(not problem, f"{source} {problem}: put its {TOKENIZER} there ({fix})")
    return sources.canonical(named or "gpt2")


def is_ours(name: str, folder: Path) -> bool:
    """Is the tokenizer.json of a folder what `export` writes for this project's tokenizer `name`?

    name: from a stranger's config.json, which may name any file of this machine. GPT-2's files are
    not needed for it.
    """
    content = files.read_bytes(folder / TOKENIZER, files.MAX_JSON)
    if name == "gpt2":
        return hashlib.sha256(content).hexdigest() == GPT2
    if name.endswith(".json"):
        return False
    with suppress(UserError):
        return tokenizers.load(name, folder / BPE_TOKENIZER).content == content
    return False


def why_unreadable(source: Path, settings: dict, named: str) -> str:
    """What says that a model without tokenizer.json has a tokenizer that cannot be read; or ""."""
    folder = folder_of(source)
    for name in OTHER_FORMATS:
        if (folder / name).exists():
            return f"has its tokenizer in {name}, which cannot be read"
    if named:
        with suppress(UserError):
            require(not named.endswith(".json"), "a path is never followed")
            sources.canonical(named)
            return ""
        return f"was trained with the tokenizer {program.one_line(named)}"

    if (folder / SETTINGS).exists():
        return f"has a {SETTINGS} without its tokenizer"
    kind = settings.get("tokenizer_class")
    if kind and kind not in tokenizer_json.CLASSES:
        return f"was trained with a tokenizer of class {shown(kind)}"
    composer = ("state", "integrations", "huggingface", "tokenizer")
    if source.suffix == ".pt" and nested(read_pickle(source), *composer):
        return "was trained with the tokenizer that it holds"
    return ""


def file_of(source: Path, name: str) -> Path | None:
    """The file beside foreign weights that `tokenizers.load` needs for a bpe-N; else None."""
    return None if name.endswith(".json") else folder_of(source) / BPE_TOKENIZER


# --------------------------------------------------------------------------------------------------
# How text is generated


def generation_of(source: Path) -> dict:
    """How a foreign model generates text: its generation_config.json, and the special ids of its
    config.json where that has none. UserError if they are no ids.
    """
    settings = foreign_settings(source)[0]
    found = {key: settings[key] for key in SPECIAL_IDS if settings.get(key) is not None}
    saved = read_if_there(folder_of(source) / GENERATION)
    found |= {key: value for key, value in saved.items() if value is not None}
    return with_valid_ids(found, source)


def kept_generation(run_dir: Path) -> dict:
    """The same of a run that was made from a foreign model; else empty."""
    folder = require_no_link(run_dir / KEPT)
    return with_valid_ids(read_if_there(require_no_link(folder / GENERATION)), folder)


def with_valid_ids(generation: dict, source: Path) -> dict:
    """`generation` without special ids that are none, as -1. UserError if eos_token_id is one."""
    ends = generation.get("eos_token_id", 0)
    are_ids = all(map(is_id, ends if isinstance(ends, list) else [ends]))
    problem = f"{source} sets eos_token_id to {shown(ends)}"
    require(are_ids, f"{problem}: expected a whole number, 0 or more")
    others = [key for key in SPECIAL_IDS if key != "eos_token_id" and key in generation]
    wrong = [key for key in others if not is_id(generation[key])]
    return {key: value for key, value in generation.items() if key not in wrong}


def is_id(value) -> bool:
    """Can this be the id of a token?"""
    return type(value) is int and 0 <= value < 2**31


def end_ids(generation: dict) -> set[int]:
    """The ids that end a text, of what `generation_of` returns."""
    value = generation.get("eos_token_id", [])
    return set(value) if isinstance(value, list) else {value}


def keep_generation(generation: dict, run_dir: Path) -> None:
    """Keep what `generation_of` returns in a run folder."""
    if generation:
        folder = run_dir / KEPT
        folder.mkdir(exist_ok=True)
        files.write_atomically(folder / GENERATION, json.dumps(generation, indent=2).encode())


# --------------------------------------------------------------------------------------------------
# To a run folder, and from one


def save(name: str, file: Path | None, run_dir: Path) -> None:
    """Copy the file of a tokenizer into a new run folder; gpt2 and bytes have none.

    Of a Hugging Face folder, or a run made from one, what describes the tokenizer goes along.
    name, file: as `tokenizers.load` takes them. Raises UserError if a file is damaged or a link.
    """
    if name.startswith("bpe"):
        tokenizers.load(name, require_no_link(file))
        shutil.copy(file, run_dir / TOKENIZER)
    if name.endswith(".json"):
        file = require_no_link(Path(file or name))
        tokenizers.load(name, file)
        (run_dir / TOKENIZER).write_bytes(tokenizers.json_of(file))
        kept = file.parent / KEPT
        copy_beside(kept if kept.exists() else file.parent, run_dir / KEPT)


def copy_beside(source: Path, target: Path) -> None:
    """Copy the files that describe a tokenizer, as far as they are there. UserError for a link."""
    if source.name == KEPT:
        require_no_link(source)
    found = [source / name for name in BESIDE if (source / name).exists()]
    if found:
        target.mkdir(exist_ok=True)
    for file in found:
        content = files.read_bytes(require_no_link(file), files.MAX_JSON)
        (target / file.name).write_bytes(content)


def export(path: Path, folder: Path) -> dict:
    """Write the tokenizer of a checkpoint into a new Hugging Face folder, with all beside it.

    Returns what config.json says of them. Raises UserError if a file is damaged or a link.
    """
    run_dir = path.parent.parent
    name = checkpoint.read_meta(path)["tokenizer"]
    file = require_no_link(run_dir / TOKENIZER)
    tokenizer = tokenizers.load(name, file)
    (folder / TOKENIZER).write_bytes(tokenizer.content)
    if name.startswith("bpe"):
        shutil.copy(file, folder / BPE_TOKENIZER)
    copy_beside(run_dir / KEPT, folder)
    write_settings(folder)

    new_document = {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot}
    generation = kept_generation(run_dir) or new_document
    generation.setdefault("eos_token_id", tokenizer.eot)  # otherwise transformers never stops
    (folder / GENERATION).write_text(json.dumps(generation, indent=2))
    special_ids = {key: generation[key] for key in SPECIAL_IDS if key in generation}
    return {"tokenizer_name": TOKENIZER if name.endswith(".json") else name, **special_ids}


def write_settings(folder: Path) -> None:
    """Write tokenizer_config.json in an exported folder, or change what is there: transformers is
    to take tokenizer.json as it is.
    """
    settings = read_if_there(folder / SETTINGS)
    elsewhere = read_if_there(folder / "special_tokens_map.json")
    missing = {
        "bos_token": tokenizers.END_OF_TEXT,
        "eos_token": tokenizers.END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    settings = {key: value for key, value in missing.items() if key not in elsewhere} | settings
    settings.pop("auto_map", None)  # code, which is not exported
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    split = files.read_json(folder / TOKENIZER).get("pre_tokenizer")
    if isinstance(split, dict) and "add_prefix_space" in split:
        settings["add_prefix_space"] = split["add_prefix_space"]  # transformers 4 would set False
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2))

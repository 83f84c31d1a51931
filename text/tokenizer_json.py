"""A tokenizer.json made from our own tokens, or from GPT-2's older pair of files.

Hugging Face's tokenizer.json holds a whole tokenizer: the split of a text into pieces, vocabulary,
merges and special tokens. The pair holds vocabulary and merges alone:

    vocab.json    token -> id; a token is spelled with one printable character a byte: "Ġthe"
    merges.txt    two tokens that become one, in the order in which they were learned: Ġ the

Our tokenizers have no merges: two neighbours are merged if together they are a token. As merges
these are all cuts of each token into two tokens: of "abc" first `a bc`, then `ab c`, if "ab" and
"bc" are tokens.
"""

import json
from pathlib import Path

from program import UserError, require
from storage import files
from storage.files import shown

VOCABULARY = "vocab.json"
MERGES = "merges.txt"
LAST_LETTER = chr(256 + 67)  # 188 bytes are spelled as themselves, the other 68 from chr(256) on
CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")  # other ones split text in another way
FLAGS = {  # of an added token, and their defaults
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def of_tokens(tokens: list[str], end_of_text: str) -> bytes:
    """The tokenizer.json of our tokens, spelled, in the order of their ids; end-of-text is last."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return written(vocabulary, merges, {end_of_text: {"id": len(tokens)}})


def of_pair(path, end_of_text: str) -> bytes:
    """The tokenizer.json of a vocab.json and the merges.txt beside it.

    Tokens that were added to them are in added_tokens.json, tokenizer_config.json and
    special_tokens_map.json. Raises UserError if a file is damaged, or the tokenizer is not GPT-2's.
    """
    folder = Path(path).parent
    settings = read_if_there(folder / "tokenizer_config.json")
    kind = settings.get("tokenizer_class") or CLASSES[0]
    fix = "put its tokenizer.json there"
    require(kind in CLASSES, f"{folder} has a tokenizer of class {shown(kind)}: {fix}")

    vocabulary = files.read_json(path)
    try:
        added = added_tokens(folder, settings, vocabulary, end_of_text)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"the added tokens in {folder} are damaged: {fix}") from error
    ids = [*vocabulary.values(), *(added[name]["id"] for name in added.keys() - vocabulary.keys())]
    are_ids = all(type(i) is int and 0 <= i < 2**31 for i in ids) and len(set(ids)) == len(ids)
    moved = [name for name in added if vocabulary.get(name, added[name]["id"]) != added[name]["id"]]
    problem = "is damaged (each token must have a whole number of its own)"
    require(are_ids and not moved, f"{path}, with the tokens that were added, {problem}: {fix}")

    spelled = vocabulary.keys() - added.keys()
    is_byte_level = all(
        token and " " < min(token) <= max(token) <= LAST_LETTER for token in spelled
    )
    require(is_byte_level, f"{path} is not of a byte-level tokenizer: no other kind is supported")
    lines = files.read_bytes(folder / MERGES, files.MAX_JSON).decode(errors="replace").split("\n")
    merges = [line.rstrip("\r") for line in lines if not line.startswith("#version")]
    begins_with_space = settings.get("add_prefix_space") is True
    return written(vocabulary, [line for line in merges if line], added, begins_with_space)


def read_if_there(path: Path) -> dict:
    """The JSON object in a file, empty if there is no file."""
    return files.read_json(path) if path.exists() else {}


def added_tokens(folder: Path, settings: dict, vocabulary: dict, end_of_text: str) -> dict:
    """The tokens that were added to a vocabulary: name -> id and other settings of each.

    settings: tokenizer_config.json. A special token without an id is left out: the model has none.
    """
    added = {
        name: {"id": i, "special": False}
        for name, i in read_if_there(folder / "added_tokens.json").items()
    }
    for i, token in (settings.get("added_tokens_decoder") or {}).items():
        added[token["content"]] = token | {"id": int(i)}

    saved = settings | read_if_there(folder / "special_tokens_map.json")
    named = [saved[key] for key in NAMED_TOKENS if saved.get(key)]
    for token in [end_of_text, *named, *(saved.get("additional_special_tokens") or [])]:
        token = token if isinstance(token, dict) else {"content": token}
        known = added.get(token["content"]) or {"id": vocabulary.get(token["content"])}
        if known["id"] is not None:
            added[token["content"]] = known | token | {"special": True}
    return added


def written(vocabulary: dict, merges: list[str], added: dict, begins_with_space=False) -> bytes:
    """A tokenizer.json that splits text as GPT-2 does.

    vocabulary: token -> id. merges: "left right". added: as `added_tokens` returns them.
    begins_with_space: a space is put before each text.
    """
    by_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": begins_with_space,
        "trim_offsets": True,
        "use_regex": True,
    }
    listed = [
        {"id": token["id"], "content": name} | {key: token.get(key, FLAGS[key]) for key in FLAGS}
        for name, token in sorted(added.items(), key=lambda item: item[1]["id"])
    ]
    # The added ones have their ids in the vocabulary, too: an id may have a gap before it.
    ids = vocabulary | {name: token["id"] for name, token in added.items()}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": listed,
        "normalizer": None,
        "pre_tokenizer": by_bytes,
        "post_processor": None,
        "decoder": by_bytes,
        "model": {"type": "BPE", "vocab": ids, "merges": merges},
    }
    return json.dumps(content, ensure_ascii=False).encode()

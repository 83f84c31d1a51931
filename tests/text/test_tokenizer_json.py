"""text/tokenizer_json.py: equal ids in Hugging Face's library, and in transformers for the pair."""

import json
import random

import pytest
from conftest import refusal, slowly

from config import TrainConfig
from text import prepare, recipe, tokenizer_json
from text.tokenizer import END_OF_TEXT, load, train_bpe

TEXTS = [
    "In 2023\n\n  and 12345 more",
    "it's größe, 日本  e\u0301\t\r\n",
    "    def f(x):\n\n\n",
    "",
]


def library(content: bytes):
    return pytest.importorskip("tokenizers").Tokenizer.from_str(content.decode())


def test_our_tokens_give_equal_ids_there():
    """Of few letters: then a token has many cuts, and words are merged in unforeseen orders."""
    draw = random.Random(0)

    def words(alphabet, n):
        return ["".join(draw.choices(alphabet, k=draw.randint(1, 40))) for _ in range(n)]

    for alphabet in ["a", "ab", "aab", "abc", "ab é"] * 3:
        ours = train_bpe(words(alphabet, 40), 257 + draw.randint(5, 150))
        theirs = library(ours.content)
        for text in words(alphabet, 40) + TEXTS:
            assert theirs.encode(text).ids == ours.encode(text).tolist(), text
        assert theirs.token_to_id(END_OF_TEXT) == ours.eot
        assert theirs.decode(ours.encode(TEXTS[1]).tolist()) == TEXTS[1]


@pytest.mark.parametrize("name", ["bytes", slowly("gpt2")])
def test_bytes_and_gpt2_give_equal_ids_there(name, request):
    ours = request.getfixturevalue("gpt2") if name == "gpt2" else load(name)
    theirs = library(ours.content)
    for text in [*TEXTS, (tokenizer_json.__doc__ or "") * 3]:
        assert theirs.encode(text).ids == ours.encode(text).tolist()
    assert theirs.get_vocab_size() == ours.vocab_size
    assert theirs.encode(END_OF_TEXT).ids == [ours.eot]


def write_pair(folder, settings=None, named=None, added=None):
    """GPT-2's pair of files for a small BPE of N ids, with tokens that were added: from N on."""
    ours = train_bpe(["le chat et le chien mangent du pain"] * 3, N)
    assert ours.vocab_size == N
    made = json.loads(ours.content)["model"]
    (folder / "vocab.json").write_text(json.dumps(made["vocab"]), encoding="utf-8")
    merges = "#version: 0.2\n" + "\n".join(made["merges"]) + "\n"
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    for name, content in [
        ("tokenizer_config.json", settings),
        ("special_tokens_map.json", named),
        ("added_tokens.json", added),
    ]:
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return ours


N = 276
GPT2 = {"tokenizer_class": "GPT2Tokenizer"}
AT_END = {"content": "<|im_end|>", "lstrip": False, "rstrip": True, "special": True}
PAIRS = {
    "alone": {"settings": GPT2},
    "space": {"settings": GPT2 | {"add_prefix_space": True}},
    "added": {"settings": GPT2, "added": {"ñandú": N, "chien": N + 1}},
    "special": {
        "settings": GPT2 | {"eos_token": "<|im_end|>", "added_tokens_decoder": {str(N): AT_END}}
    },
    "map": {
        "settings": GPT2,
        "added": {"<pad>": N},
        "named": {"pad_token": {"content": "<pad>"}, "unk_token": END_OF_TEXT},
    },
}


@pytest.mark.parametrize("more", PAIRS.values(), ids=PAIRS)
def test_a_pair_gives_the_ids_of_transformers(more, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = write_pair(tmp_path, **more)
    found = load(str(tmp_path / "vocab.json"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    special = " ".join(found.special_tokens)
    for text in ["le chat mange", " ñandú, le chien  ", *TEXTS]:
        assert found.encode(text).tolist() == theirs.encode(text)
    if more == PAIRS["alone"]:
        assert found.encode("le chat").tolist() == ours.encode("le chat").tolist()
    spoken = f"le chat {special} pain"
    assert found.encode_special(spoken).tolist() == theirs.encode(spoken)
    assert found.eot == theirs.convert_tokens_to_ids(END_OF_TEXT)
    (tmp_path / "data").mkdir()
    cfg = TrainConfig(tokenizer=found.name, data_dir=str(tmp_path / "data"))
    copy = prepare.make_tokenizer(recipe.Recipe(cfg))
    assert copy.fingerprint == found.fingerprint


BAD = {
    "class 'RobertaTokenizer'": (
        "tokenizer_config.json",
        lambda saved: {"tokenizer_class": "RobertaTokenizer"},
    ),
    "added tokens in": (
        "tokenizer_config.json",
        lambda saved: {"added_tokens_decoder": {"x": [1]}},
    ),
    "a whole number of its own": ("added_tokens.json", lambda saved: {"le": N}),
    "with the tokens that were added": ("added_tokens.json", lambda saved: {"chien": 3}),
    "must have a whole number": ("vocab.json", lambda vocab: vocab | {"a": 3, "b": 3}),
    "not of a byte-level tokenizer": ("vocab.json", lambda vocab: vocab | {"le chat": 999}),
    f"has no {END_OF_TEXT}": (
        "vocab.json",
        lambda vocab: {token: i for token, i in vocab.items() if len(token) < 9},
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_a_pair_that_cannot_be_read_is_one_line(message, tmp_path):
    pytest.importorskip("tokenizers")
    write_pair(tmp_path, settings=GPT2, added={"chien": N})
    name, change = BAD[message]
    value = json.loads((tmp_path / name).read_text(encoding="utf-8"))
    (tmp_path / name).write_text(json.dumps(change(value)), encoding="utf-8")
    assert message in refusal(load, str(tmp_path / "vocab.json"))

"""text/tokenizer.py: every text comes back, training equals Hugging Face's, errors are one line."""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from conftest import byte_level, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from program import UserError
from text import tokenizer
from text.tokenizer import BYTES, END_OF_TEXT, load, train_bpe


def stdlib(characters: int) -> list[str]:
    """Files of Python's standard library, about this many characters."""
    texts, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8"))
        total += len(texts[-1])
        if total > characters:
            break
    return texts


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(stdlib(100_000), 512)


def train_there(texts: list[str], tokens: int, special=()):
    """A byte-level BPE of `tokens` entries by Hugging Face's trainer; special ones come first."""
    library = pytest.importorskip("tokenizers")
    made = byte_level()
    made.model = library.models.BPE()
    trainer = library.trainers.BpeTrainer(
        vocab_size=tokens,
        min_frequency=2,
        special_tokens=list(special),
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """Like GPT-NeoX's: end-of-text is its first id, and tokens of several spaces were added."""
    library = pytest.importorskip("tokenizers")
    made = train_there(stdlib(50_000), 400, [END_OF_TEXT])
    made.add_tokens([library.AddedToken(" " * n, normalized=True) for n in (2, 4, 8)])
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    made.save(str(path))
    return load(str(path))


def test_a_hugging_face_tokenizer(hugging_face):
    assert hugging_face.eot == 0 and hugging_face.vocab_size == 403
    assert hugging_face.dtype == np.uint16
    text = "def größe(x):\n        return x  # 日本"
    ids = hugging_face.encode(text)
    assert ids.tolist() == hugging_face.library.encode(text).ids and ids.max() >= 400
    assert hugging_face.decode(ids) == hugging_face.library.decode(ids.tolist()) == text
    one_by_one = [hugging_face.decode_bytes([i]) for i in ids]  # some hold parts of a character
    assert b"".join(one_by_one) == text.encode()
    assert 0 not in hugging_face.encode(f"a {END_OF_TEXT} b")
    assert hugging_face.decode([0]) == END_OF_TEXT
    assert load(hugging_face.name).fingerprint == hugging_face.fingerprint


@pytest.fixture(scope="module", params=["bytes", "bpe", "gpt2", "hugging_face"])
def any_kind(request):
    return load("bytes") if request.param == "bytes" else request.getfixturevalue(request.param)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back(any_kind, text):
    ids = any_kind.encode(text)
    assert any_kind.decode(ids) == text
    assert any_kind.decode_bytes(ids) == text.encode()
    assert ids.dtype == np.uint16 and ids.ndim == 1
    assert all(ids < any_kind.vocab_size) and any_kind.eot not in ids


def test_no_text_encodes_to_end_of_text(any_kind):
    ids = any_kind.encode(f"a{END_OF_TEXT}b")
    assert any_kind.eot not in ids
    assert any_kind.decode(ids) == f"a{END_OF_TEXT}b"
    assert any_kind.decode([any_kind.eot]) == END_OF_TEXT


def test_decode_replaces_what_is_no_text(any_kind):
    beyond = [any_kind.vocab_size, -1]  # a model's vocabulary may be larger
    assert any_kind.decode(beyond) == "\ufffd\ufffd"
    half_e = next(i for i, token in any_kind.bytes_of.items() if token == "é".encode()[:1])
    assert any_kind.decode([half_e]) == "\ufffd"
    assert any_kind.decode_bytes([half_e]) == b"\xc3"
    assert any_kind.decode([]) == ""
    half_a_surrogate_pair = "a\ud800b"
    assert any_kind.decode(any_kind.encode(half_a_surrogate_pair)) == "a\ufffdb"


def test_long_runs_of_one_character(any_kind):
    for character in " \na-":
        assert any_kind.decode(any_kind.encode(character * 300_000)) == character * 300_000


def test_known_ids(gpt2):
    assert load("bytes").encode("é\n").tolist() == [0xC3, 0xA9, 10] and load("bytes").eot == 256
    tiny = train_bpe(["low low lower"], 4096)
    assert tiny.name == "bpe-4096" and tiny.tokens[256:] == [b"lo", b"low", b" low"]
    assert train_bpe([], 4096).vocab_size == 257
    assert gpt2.vocab_size == 50257
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    wanted = [31373, 220, 995, 628, 198, 836, 470, 17031]
    assert gpt2.encode("hello  world\n\n\n don't 123").tolist() == wanted
    wanted = [27, 91, 437, 1659, 5239, 91, 29]  # from tiktoken's documentation
    assert gpt2.encode(END_OF_TEXT).tolist() == wanted


def test_our_split_is_tiktokens(gpt2):
    """Our GPT-2 has its tokens and our SPLIT: its ids equal those of tiktoken's own encoding."""
    import tiktoken

    odd_spaces_and_letters = " \x0b\x0c\x1c\x85\u200b\u3000ßЖ  中文²½Ⅷ٣ 'S 're\t\t x \r\n\r\n "
    text = "".join(stdlib(200_000)) + odd_spaces_and_letters
    assert gpt2.encode(text).tolist() == tiktoken.get_encoding("gpt2").encode_ordinary(text)


def test_fingerprints_are_stable(gpt2):
    """Prepared data is refused under another fingerprint, so these must not change by accident."""
    assert load("bytes").fingerprint == "fdf46046baa81ed0"
    assert gpt2.fingerprint == "e70b36628c3174d8"


def tokens_of(model) -> list[bytes]:
    """The tokens of Hugging Face's model, which spells each byte as one printable character."""
    alphabet = sorted(pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    byte_of = dict(zip(alphabet, BYTES, strict=True))
    vocabulary = {text: i for text, i in model.get_vocab().items() if text != END_OF_TEXT}
    spellings = sorted(vocabulary, key=vocabulary.get)
    return [b"".join(byte_of[c] for c in spelling) for spelling in spellings]


def test_training_equals_hugging_face():
    texts = stdlib(300_000)
    model = train_there(texts, 2047)
    ours = train_bpe(reversed(texts), 2048)
    assert ours.tokens == tokens_of(model) and ours.vocab_size == 2048
    text = stdlib(1_000_000)[-1]
    assert ours.encode(text).tolist() == model.encode(text).ids


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="aabc é", max_size=40), max_size=8), size=st.integers(257, 300)
)
def test_ties_and_overlaps_equal_hugging_face_and_the_slow_version(texts, size):
    ours = train_bpe(texts, size).tokens
    assert ours == tokens_of(train_there(texts, size - 1))
    pieces = [piece for text in texts for piece in text.split("b")]
    words = [[BYTES.index(bytes([value])) for value in piece.encode()] for piece in pieces]
    counts = [1 + i % 3 for i in range(len(words))]
    assert tokenizer.learn_slowly(words, counts, size) == tokenizer.learn([*words], counts, size)


def test_wrong_names():
    assert "choices: gpt2, bytes, bpe-N" in refusal(load, "gtp2")
    assert "take bpe-257 or more" in refusal(load, "bpe-256")


def forged(texts):
    """A saved tokenizer with these tokens and the fingerprint that fits them."""
    tokens = [text.encode("latin-1") for text in texts]
    fingerprint = tokenizer.fingerprint(tokenizer.SPLIT, tokens)
    return json.dumps({"name": "bpe-512", "tokens": texts, "fingerprint": fingerprint})


def test_wrong_files_are_told_apart(bpe, tmp_path):
    """test_fuzz.py damages such a file; here each is well-formed."""
    path = tmp_path / "bpe.json"
    bpe.save(str(path))
    saved = json.loads(path.read_text())
    saved["tokens"][300], saved["tokens"][301] = saved["tokens"][301], saved["tokens"][300]
    assert "holds bpe-512, not bpe-4096" in refusal(load, "bpe", str(path))
    for content, message in (
        (json.dumps(saved), "damaged"),
        (forged(["a", "b"]), "not a tokenizer file"),  # without all bytes
        (json.dumps(saved | {"tokens": [1, None, {}]}), "not a tokenizer file"),
    ):
        path.write_text(content)
        assert message in refusal(load, "bpe-512", str(path))
    assert "nowhere.json" in refusal(load, "bpe", str(tmp_path / "nowhere.json"))
    assert "path" in refusal(load, "bpe")


def test_the_tokenizer_json_of_our_own_runs_is_named_by_its_path(tmp_path):
    """Of other text, too: the ids are those of the run. Its folder has a copy, as of any other."""
    made = train_bpe(["größe and more, and more " * 9], 280)
    file = tmp_path / "tokenizer.json"
    made.save(file)
    loaded = load(str(file))
    assert loaded.fingerprint == made.fingerprint and loaded.name == str(file)
    (tmp_path / "text.txt").write_text("".join(f"line {i} and more\n\n" for i in range(999)))
    flags = f"--dataset={tmp_path}/text.txt --tokenizer={file} --data_dir={tmp_path}/tokens"
    data.main([*flags.split(), "--val_fraction=0.1", "--max_seq_len=64"])
    file.unlink()
    copy = load(str(file), tmp_path / "tokens/tokenizer.json")
    assert copy.fingerprint == made.fingerprint


# --- tokenizer.json of others


GPT4 = (  # GPT-4's and Llama 3's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("pattern", [GPT4, r"(q+)+$"])
def test_patterns_of_others_work_or_fail_in_one_line(tmp_path, pattern):
    """The second one backtracks without end."""
    library = pytest.importorskip("tokenizers")
    made = byte_level()
    split = library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
    bytes_alone = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = library.pre_tokenizers.Sequence([split, bytes_alone])
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = load(str(tmp_path / "tokenizer.json"))
    text = "it's 12345 größe\n\n  x"
    assert loaded.decode(loaded.encode(text)) == text
    if pattern != GPT4:
        assert "cannot encode 'qqqq" in refusal(loaded.encode, "q" * 100 + "!")


ADDED = st.tuples(
    st.text("aé č<ß世Ġ|>", min_size=1, max_size=4),
    st.booleans(),
    st.fixed_dictionaries(
        dict.fromkeys("normalized lstrip rstrip single_word".split(), st.booleans())
    ),
)


@settings(deadline=None, max_examples=60)
@given(
    added=st.lists(ADDED, min_size=1, max_size=4),
    pieces=st.lists(
        st.sampled_from(["a", "é", " ", "č", "<", "世", "\n", 0, 1, 2, 3]), max_size=12
    ),
    composes=st.booleans(),
)
def test_added_tokens_decode_to_their_text(tmp_path_factory, added, pieces, composes):
    """All text comes back but the white space that a token takes. A special one is not found."""
    library = pytest.importorskip("tokenizers", reason="see requirements-extra.txt")
    path = tmp_path_factory.getbasetemp() / "added.json"
    made = byte_level()
    made.normalizer = library.normalizers.NFC() if composes else None
    for name, special, flags in added:
        token = library.AddedToken(name, special=special, **flags)
        (made.add_special_tokens if special else made.add_tokens)([token])
    made.save(str(path))
    names = [name for name, _, _ in added]
    text = "".join(p if isinstance(p, str) else names[p % len(names)] for p in pieces)
    try:
        loaded = load(str(path))
    except UserError as error:  # a letter that is the spelling of a byte
        assert "as the token of the bytes" in str(error) and set("éßčĠ").intersection(names)
        return
    for encode in (loaded.encode, loaded.encode_special):
        decoded = loaded.decode(encode(text))
        assert "".join(decoded.split()) == "".join(text.split())
        strips = any(flags["lstrip"] or flags["rstrip"] for _, _, flags in added)
        assert strips or decoded == text
    special = {token.id for token in loaded.special_tokens.values() if token.special}
    assert not special.intersection(loaded.encode(text).tolist())


@pytest.mark.parametrize(
    "name, is_marker", [("<|im_end|>", True), ("<｜User｜>", True), ("<b>", False)]
)
def test_a_marker_is_special_whatever_its_file_says(tmp_path, name, is_marker):
    made = byte_level()
    made.add_tokens([name])
    made.save(str(tmp_path / "t.json"))
    loaded = load(str(tmp_path / "t.json"))
    token_id = made.token_to_id(name)
    assert (token_id in loaded.encode(f"a{name}b")) != is_marker
    a, b = loaded.encode("ab").tolist()
    assert loaded.encode_special(f"a{name}b").tolist() == [a, token_id, b]


def test_padding_truncation_and_large_ids(tmp_path):
    """A file may ask for padding to a billion tokens or truncation, or number a token 100,000."""
    path = tmp_path / "tokenizer.json"
    made = byte_level()
    made.enable_padding(length=10**9, pad_token="a")
    made.enable_truncation(3)
    made.save(str(path))
    assert load(str(path)).encode("some words").shape == (10,)

    content = json.loads(path.read_text())
    content["model"]["vocab"]["a"] = 100_000
    path.write_text(json.dumps(content))
    loaded = load(str(path))
    assert loaded.vocab_size == 100_001 and loaded.dtype == np.uint32
    assert 100_000 in loaded.encode("abc")

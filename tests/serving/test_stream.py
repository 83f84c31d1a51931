"""serving/stream.py: how a text ends, what is shown when, texts beside each other, the speed."""

import re

import pytest
from test_decoder import TINY, decoder, model

from config import MPTConfig, UserError
from serving.stream import Speed, Text, write
from text import tokenizer as tokenizers

pytestmark = pytest.mark.usefixtures("one_thread")

BYTES = tokenizers.load("bytes")


def texts(cfg, prompts, n=40, stops=(), seed=1):
    return [Text(prompt, BYTES, cfg, n, stops, seed) for prompt in prompts]


def result(text):
    return text.ids, text.text, text.end


@pytest.mark.parametrize(
    "more", [{"alibi": True}, {}, {"rope": True}, {"alibi": True, "kv_n_heads": 2}], ids=str
)
def test_texts_do_not_depend_on_those_beside_them(more):
    """Sampled, ending at different places: stop strings, end of text, the last token, the last learned position."""
    mpt = model(vocab_size=257, **more)
    decode, how = decoder(mpt, 257), {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
    prompts, stops = (
        ["a", "the river ran", "", "of the water", "to be", "x" * 20],
        ("e", "\x00", "\x07"),
    )
    together = texts(mpt.cfg, prompts, stops=stops)
    pieces = {text: "" for text in together}
    for text, piece in write(decode, together, Speed(), **how):
        pieces[text] += piece
    alone = texts(mpt.cfg, prompts, stops=stops)
    for text in alone:
        list(write(decode, [text], Speed(), **how))
    assert [result(text) for text in together] == [result(text) for text in alone]
    assert list(pieces.values()) == [text.text for text in together]
    assert (
        len({text.new_tokens for text in together}) > 2 and len({text.end for text in together}) > 1
    )
    if not more:
        assert {len(text.ids) for text in together if text.end == "max_seq_len"} == {25}


def test_the_seed_decides_the_text():
    mpt = model(alibi=True, vocab_size=257)
    decode = decoder(mpt, 257)

    def written(**how):
        (text,) = texts(mpt.cfg, ["river"], **how)
        list(write(decode, [text], Speed(), temperature=1.0))
        return text.ids

    assert written(seed=3) == written(seed=3) != written(seed=4)
    assert written(seed=3, n=60)[:45] == written(seed=3)


def added(text, new):
    return [text.add(token) for token in new]


def test_a_stop_string_may_span_tokens():
    (text,) = texts(MPTConfig(**TINY, alibi=True), ["?"], stops=["END", "]]>"])
    assert added(text, b"aENbE]N") == ["a", "", "", "ENb", "", "E", "]N"] and text.end is None
    assert added(text, b"END") == ["", "", ""] and (text.text, text.end) == (
        "aENbE]N",
        "stop string",
    )


def test_the_first_of_two_stop_strings_counts():
    (text,) = texts(MPTConfig(**TINY, alibi=True), ["?"], stops=["bcd", "c"])
    text.tokenizer = tokenizers.Tokenizer("bytes", [b"ab", b"cd"])  # one token completes both
    assert added(text, [0, 1]) == ["a", ""] and text.text == "a"


def test_held_back_characters_come_when_the_text_ends():
    (text,) = texts(MPTConfig(**TINY, alibi=True), ["?"], n=3, stops=["yes!"])
    assert added(text, b"yes") == ["", "", "yes"] and text.end == "max_new_tokens"
    (text,) = texts(MPTConfig(**TINY, alibi=True), ["?"], stops=["yes!"])
    assert (
        added(text, [*b"ye", BYTES.eot]) == ["", "", "ye"]
        and text.end == "end of text"
        and text.new_tokens == 2
    )


def test_a_character_is_shown_when_it_is_whole():
    (text,) = texts(MPTConfig(**TINY, alibi=True), ["?"])
    shown = added(text, "é€😀".encode())
    assert shown == ["", "é", "", "", "€", "", "", "", "😀"]
    assert added(text, [0xC3, ord("a")]) == ["", "\ufffda"]  # no character begins so


def test_speed_is_bytes_over_seconds():
    mpt = model(alibi=True, kv_n_heads=2)
    weights = sum(p.numel() for p in mpt.parameters()) * 4
    line = Speed(10, 0.5, steps=4, tokens=8, seconds=2.0, cached=300).report(decoder(mpt))
    read = (
        4 * weights + 300 * 2 * 2 * 2 * 8 * 4
    ) / 4  # bytes a step: 2 layers, k and v, 2 heads of 8 numbers
    assert "10 tokens, 20 tokens/s" in line and "8 tokens, 4 tokens/s, 4 steps of 500.00 ms" in line
    assert f"{read / 1e6:,.1f} MB" in line and re.search(r"\d+% of \d+ \(this CPU's", line)


def test_steps_are_counted():
    mpt, speed = model(alibi=True, vocab_size=257), Speed()
    list(write(decoder(mpt, 257), texts(mpt.cfg, ["abc", "a"], n=5), speed, temperature=0))
    assert (speed.prompt_tokens, speed.steps, speed.tokens) == (4, 4, 8)
    assert speed.cached == 2 * (4 + 5 + 6 + 7)  # 3 tokens of the longer prompt, and the step's own


def test_a_prompt_beyond_learned_positions_is_refused_before_anything_is_written():
    (fits,) = texts(MPTConfig(**TINY), ["x" * 24])
    assert fits.n_prompt == 24
    with pytest.raises(
        UserError, match="has 25 tokens, but learned positions end at max_seq_len 24: shorten it"
    ):
        texts(MPTConfig(**TINY), ["x" * 25])
    texts(MPTConfig(**TINY, alibi=True), ["x" * 25])
    texts(MPTConfig(**TINY, rope=True), ["x" * 25])

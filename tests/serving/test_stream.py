"""serving/stream.py and serving/speed.py: ends of texts, what is shown when, speed."""

import re

import pytest
import torch
from conftest import refusal
from test_decoder import TINY, decoder, model

import devices
from config import MPTConfig
from serving.speed import Speed, share_of_bandwidth
from serving.stream import Text, write
from text import tokenizer as tokenizers

pytestmark = pytest.mark.usefixtures("one_thread")

BYTES = tokenizers.load("bytes")
ALIBI = MPTConfig(**TINY, alibi=True)


def texts(cfg, prompts, n=40, stops=(), seed=1):
    """A Text for each prompt, over bytes."""
    return [Text(prompt, BYTES, cfg, n, stops, seed) for prompt in prompts]


def test_special_tokens_of_a_prompt_are_text_unless_asked_for():
    prompt = "a<|endoftext|>b"
    spelled = Text(prompt, BYTES, ALIBI, 1)
    assert bytes(spelled.ids).decode() == prompt
    assert Text(prompt, BYTES, ALIBI, 1, special_tokens=True).ids == [97, BYTES.eot, 98]


def test_prompts_may_be_ids():
    (text,) = texts(ALIBI, ["a\xe9"])
    as_ids = Text(text.ids, BYTES, ALIBI, 40, seed=1)
    assert (as_ids.ids, as_ids.prompt) == (text.ids, "a\xe9")
    assert as_ids.uniforms.equal(text.uniforms)
    assert Text([], BYTES, ALIBI, 1).ids == [BYTES.eot]
    for unknown in (-1, 257):
        assert "ids are from 0 to 256" in refusal(texts, ALIBI, [[97, unknown]])


def test_the_seed_decides_the_text():
    mpt = model(alibi=True, vocab_size=257)
    decode = decoder(mpt, 257)

    def written(**options):
        (text,) = texts(mpt.cfg, ["river"], **options)
        list(write(decode, text, temperature=1.0))
        return text.ids

    assert written(seed=3) == written(seed=3) != written(seed=4)
    assert written(seed=3, n=60)[:45] == written(seed=3)


def test_each_text_is_drawn_by_numbers_of_its_own():
    """A coin for each prompt falls on both sides, and no seed's second text is another's first."""
    numbers = {}
    for seed in (1, 2, 3):
        for repeat in (0, 1, 2):
            for prompt in (f"Question {i}: is it so?" for i in range(300)):
                text = Text(prompt, BYTES, ALIBI, 4, seed=seed, repeat=repeat)
                numbers[seed, repeat, prompt] = tuple(text.uniforms.tolist())
    assert len(set(numbers.values())) == len(numbers)
    for seed in (1, 2, 3):
        coins = [u[0] < 0.5 for (s, repeat, _), u in numbers.items() if (s, repeat) == (seed, 0)]
        assert len(coins) == 300 and 110 < sum(coins) < 190  # 150 +- 4.6 standard deviations


def add_all(text, tokens):
    """What each token makes ready to show."""
    return [text.add(token) for token in tokens]


def test_a_stop_string_may_span_tokens():
    (text,) = texts(ALIBI, ["?"], stops=["END", "]]>"])
    assert add_all(text, b"aENbE]N") == ["a", "", "", "ENb", "", "E", "]N"]
    assert text.end is None
    assert add_all(text, b"END") == ["", "", ""]
    assert (text.text, text.end) == ("aENbE]N", "stop string")


def test_the_first_of_two_stop_strings_counts():
    (text,) = texts(ALIBI, ["?"], stops=["bcd", "c"])
    text.tokenizer = tokenizers.Tokenizer("bytes", [b"ab", b"cd"])  # one token completes both
    assert add_all(text, [0, 1]) == ["a", ""]
    assert text.text == "a"


def test_held_back_characters_come_when_the_text_ends():
    (text,) = texts(ALIBI, ["?"], n=3, stops=["yes!"])
    assert add_all(text, b"yes") == ["", "", "yes"] and text.end == "max_new_tokens"
    (text,) = texts(ALIBI, ["?"], stops=["yes!"])
    assert add_all(text, [*b"ye", BYTES.eot]) == ["", "", "ye"]
    assert (text.end, text.new_tokens) == ("end of text", 2)


def test_a_character_is_shown_when_it_is_whole():
    (text,) = texts(ALIBI, ["?"])
    shown = add_all(text, "é€😀".encode())
    assert shown == ["", "é", "", "", "€", "", "", "", "😀"]
    assert add_all(text, [0xC3, ord("a")]) == ["", "\ufffda"]  # no character begins like this


def test_speed_is_bytes_over_seconds():
    mpt = model(alibi=True, kv_n_heads=2)
    weights = sum(p.numel() for p in mpt.parameters()) * 4
    kv_per_token = 2 * 2 * 2 * 8 * 4  # 2 layers, k and v, 2 heads of 8 numbers in fp32
    read = (4 * weights + 300 * kv_per_token) / 4  # bytes a step

    speed = Speed(10, 0.5, steps=4, tokens=8, seconds=2.0, cached_tokens=300)
    line = speed.report(decoder(mpt))
    assert "10 tokens, 20 tokens/s" in line
    assert "8 tokens, 4 tokens/s, 4 steps of 500.00 ms" in line
    assert f"{read / 1e6:,.1f} MB" in line
    assert re.search(r"\d+% of \d+ \(this CPU's", line)


@pytest.mark.parametrize("known", [None, devices.derived("gfx942", 80, None, None)])
def test_a_gpu_of_unknown_bandwidth_gets_no_share(monkeypatch, known):
    """One that is not in the table, and one of which the table only knows FLOPs per clock."""
    monkeypatch.setattr(devices, "identify", lambda device: known)
    assert share_of_bandwidth(100.0, torch.device("cuda")) == "share of the bandwidth n/a"


def test_a_prompt_beyond_learned_positions_is_refused_before_anything_is_written():
    learned = MPTConfig(**TINY)
    (fits,) = texts(learned, ["x" * 24])
    assert fits.n_prompt == 24
    message = refusal(texts, learned, ["x" * 25])
    assert "25 tokens" in message and "max_seq_len 24" in message
    texts(ALIBI, ["x" * 25])
    texts(MPTConfig(**TINY, rope=True), ["x" * 25])

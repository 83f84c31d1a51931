"""serving/stream.py and serving/speed.py: ends of texts, what is shown when, speed."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import refusal
from test_decoder import TINY, decoder, model

import devices
from config import MPTConfig
from serving.speed import Speed, kv_bytes_per_token, ms_per_token, share_of_bandwidth
from serving.stream import Text, write
from text import tokenizer as tokenizers

pytestmark = pytest.mark.usefixtures("one_thread")

BYTES = tokenizers.load("bytes")
ALIBI = MPTConfig(**TINY, alibi=True)


def texts(cfg, prompts, n=40, stops=(), seed=1):
    """A Text for each prompt, over bytes."""
    return [Text(prompt, BYTES, cfg, n, stops, seed) for prompt in prompts]


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


def test_bytes_of_keys_and_values_are_the_published_ones():
    """OPT-13B: Kwon et al. (2309.06180), section 3. Llama 2 70B keeps an eighth of its heads."""
    opt_13b = MPTConfig(d_model=5120, n_heads=40, n_layers=40)
    assert kv_bytes_per_token(opt_13b) == 800 * 1024
    llama2_70b = MPTConfig(d_model=8192, n_heads=64, n_layers=80, kv_n_heads=8)
    assert kv_bytes_per_token(llama2_70b) == 2 * 80 * 8 * 128 * 2
    assert kv_bytes_per_token(llama2_70b, tp=4) == 2 * 80 * 2 * 128 * 2
    one_head = replace(llama2_70b, kv_n_heads=1)  # whole on each rank
    assert kv_bytes_per_token(one_head, tp=4) == kv_bytes_per_token(one_head)


def test_milliseconds_by_hand():
    """MPT-7B: 6,658,859,008 parameters, of which 2,048 x 4,096 are positions."""
    m = MPTConfig(d_model=4096, n_heads=32, n_layers=32)
    weights = 2 * (6_658_859_008 - 2048 * 4096)
    kv_per_token = 2 * 32 * 4096 * 2
    ms = (weights + 8 * 1000 * kv_per_token) / 2039e9 * 1e3
    assert ms_per_token(m, 8, 1000, 2039) == pytest.approx(ms)
    assert ms_per_token(m, 8, 1000, 2039, width=4) == pytest.approx(2 * ms)
    window = replace(m, sliding_window_size=999)  # and the token's own key
    assert ms_per_token(window, 8, 5000, 2039) == pytest.approx(ms)


@pytest.mark.parametrize("tied", [True, False])
def test_speed_is_bytes_over_seconds(tied):
    """The bytes of the weights that a step reads, and of a real cache."""
    mpt = model(kv_n_heads=2, tie_word_embeddings=tied)
    looked_up = ["transformer.wpe.weight"] + ([] if tied else ["transformer.wte.weight"])
    weights = sum(p.numel() for name, p in mpt.named_parameters() if name not in looked_up) * 4
    cache = mpt.new_cache(5, 7, torch.float32)
    of_cache = (cache.k.nbytes + cache.v.nbytes) // 5 // 7
    speed = Speed(10, 0.5, steps=4, tokens=8, seconds=2.0, cached_tokens=300)
    line = speed.report(decoder(mpt))
    assert "10 tokens, 20 tokens/s" in line
    assert "8 tokens, 4 tokens/s, 4 steps of 500.00 ms" in line
    assert f"{(4 * weights + 300 * of_cache) / 4 / 1e6:,.1f} MB" in line
    assert re.search(r"\d+% of \d+ \(this CPU's", line)


@pytest.mark.parametrize("n_key_heads", [2, 1])
def test_a_tensor_rank_reads_its_part(n_key_heads):
    """Of the weights, and of the cache unless its only head is whole on each rank."""
    m = MPTConfig(d_model=32, n_heads=4, n_layers=2, kv_n_heads=n_key_heads)
    bytes_read = []
    for n_ranks in (1, 2):
        kinds = {"dtype": torch.float32, "cache_dtype": torch.float32}
        part = SimpleNamespace(cfg=m, n_ranks=n_ranks, **kinds)
        speeds = Speed(steps=4), Speed(cached_tokens=300)
        bytes_read.append([speed.bytes_read(part) for speed in speeds])
    (whole_weights, whole_cache), (weights, cache) = bytes_read
    assert whole_weights == 2 * weights
    assert whole_cache == n_key_heads * cache


def test_a_gpu_of_unknown_bandwidth_gets_no_share(monkeypatch):
    monkeypatch.setattr(devices, "identify", lambda device: None)
    assert share_of_bandwidth(100.0, torch.device("cuda")) == "share of the bandwidth n/a"


def test_a_prompt_beyond_learned_positions_is_refused_before_anything_is_written():
    learned = MPTConfig(**TINY)
    (fits,) = texts(learned, ["x" * 24])
    assert fits.n_prompt == 24
    message = refusal(texts, learned, ["x" * 25])
    assert "25 tokens" in message and "max_seq_len 24" in message
    texts(ALIBI, ["x" * 25])
    texts(MPTConfig(**TINY, rope=True), ["x" * 25])

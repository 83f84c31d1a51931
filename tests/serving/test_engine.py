"""serving/engine.py, rows.py, thread.py: texts in company are those of the one-text loop."""

import collections
import functools
import math
import os
import random
import signal
import threading
from unittest import mock

import pytest
import torch
from conftest import PATIENCE, refusal, slowly
from hypothesis import given, settings
from hypothesis import strategies as st
from test_adapters import bank_on, random_tensors
from test_decoder import LLAMA_LIKE, decoder, model

from model import MPT
from program import UserError
from serving.adapters import BASE
from serving.engine import MIN_COST, Engine, Request
from serving.rows import BLOCK
from serving.sampling import Sampling
from serving.stream import Text, write
from serving.thread import SHUTTING_DOWN, EngineThread
from text import tokenizer as tokenizers

pytestmark = pytest.mark.usefixtures("one_thread", "memory_of_nan")

BYTES = tokenizers.load("bytes")
V = BYTES.vocab_size
# Bytes again, of which some end a text, as a model's folder may name more ends.
ENDING = tokenizers.Tokenizer("bytes", [bytes([i]) for i in range(256)])
ENDING.ends = {BYTES.eot, 3, 77, 130, 201, 222}
KINDS = {
    "alibi": {"alibi": True},
    "learned": {},
    "rope": {"rope": True},
    "gqa": {"alibi": True, "kv_n_heads": 2},
    "llama-like": LLAMA_LIKE,
    "window": {"alibi": True, "sliding_window_size": 5},
}
SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(),
    Sampling(0.8, top_k=50),
    Sampling(1.5, top_p=0.9),
    Sampling(0.5, top_k=20, top_p=0.5),
]
GREEDY = SAMPLINGS[0]
ADAPTERS = [BASE, BASE, "a", "b", "c"]
STEMS = [
    "",
    "the river ran ",
    "once upon a time there was a model that could not count to twenty. ",
]
MAX_TOKENS = 114


@pytest.fixture
def memory_of_nan(monkeypatch):
    """New caches are full of NaN, as new memory may be."""
    new_cache = MPT.new_cache

    def spoiled(self, *args):
        cache = new_cache(self, *args)
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
        return cache

    monkeypatch.setattr(MPT, "new_cache", spoiled)


@functools.cache
def tiny(kind: str) -> MPT:
    """A model in float64: sums in another order give the same fp32 logits."""
    return model(vocab_size=V, max_seq_len=84, **KINDS[kind]).double()


def served(kind="alibi", n_slots=8, read=random_tensors):
    """A decoder with a bank of adapters that are in memory, by name."""
    cfg = tiny(kind).cfg
    decode, _ = bank_on(tiny(kind), n_slots, read=lambda name: read(cfg, name))
    return decode


def request(prompt="the river", n=8, sampling=GREEDY, adapter=BASE, kind="alibi", seed=1, **more):
    text = Text(prompt, BYTES, tiny(kind).cfg, n, more.pop("stops", ()), seed, adapter)
    return Request(text, sampling, **more)


def finished(engine, *requests):
    """Submit requests and step until all have ended. Returns all events."""
    for one in requests:
        engine.submit(one)
    events = []
    while engine.is_busy:
        events += engine.step()
    return events


def alone(decode, one: Request) -> Text:
    """The text of the same request by the obvious version."""
    old = one.text
    ids = old.ids[: old.n_prompt]
    text = Text(
        ids, old.tokenizer, decode.cfg, old.max_new_tokens, old.stops, old.seed, old.adapter
    )
    list(write(decode, text, **vars(one.sampling)))
    return text


def assert_as_alone(decode, *requests):
    for one in requests:
        wanted = alone(decode, one)
        assert (one.text.ids, one.text.text, one.text.end) == (wanted.ids, wanted.text, wanted.end)


def assert_nothing_is_held(engine):
    assert not (engine.running or engine.reading or engine.loading or engine.waiting)
    assert not engine.batch.rows.pads and engine.batch.prompt is None
    prefixes = engine.batch.prefixes
    assert len(prefixes.blocks) <= prefixes.most_blocks
    if engine.bank:
        assert not any(resident.users for resident in engine.bank.residents.values())


# --- Texts do not depend on their company


def random_request(rng, kind: str, number: int) -> Request:
    """Prompts of 0 to 84 tokens, which share beginnings; any sampling, adapter and stop strings."""
    stem = rng.choice(STEMS)
    begin, end = stem[: rng.randrange(len(stem) + 1)], "abcdef"[: rng.randrange(7)]
    prompt = (begin + end * rng.choice([1, 4]))[:84]
    n = rng.choice([1, 10, 30])
    stops = rng.choice([(), ("e", "\x00", "\x07")])
    sampling, adapter = rng.choice(SAMPLINGS), rng.choice(ADAPTERS)
    one = request(prompt, n, sampling, adapter, kind, number, stops=stops)
    one.text.tokenizer = ENDING
    return one


def compare(kind: str, seed: int, n_texts: int) -> collections.Counter:
    """Random arrivals and cancels. Each text equals the one that is written alone."""
    rng = random.Random(seed)
    decode = served(kind, n_slots=rng.choice([2, 8]))
    engine = Engine(
        decode,
        n_rows=rng.choice([2, 5, 16]),
        max_tokens=MAX_TOKENS,
        chunk=rng.choice([3, 40, 256]),
        prefix_bytes=rng.choice([100_000, 10**7]),
    )
    requests = [random_request(rng, kind, number) for number in range(n_texts)]
    coming, pieces = list(requests), collections.defaultdict(str)
    while coming or engine.is_busy:
        while coming and rng.random() < 0.5:
            engine.submit(coming.pop())
        submitted = requests[len(coming) :]
        if submitted and rng.random() < 0.03:
            engine.cancel(rng.choice(submitted))
        for event in engine.step():
            pieces[event.request] += event.piece
    assert_nothing_is_held(engine)

    ends = collections.Counter(one.text.end for one in requests)
    for one in requests:
        if one.text.end in (None, "cancelled"):
            assert alone(decode, one).ids[: len(one.text.ids)] == one.text.ids
        else:
            assert_as_alone(decode, one)
            assert pieces[one] == one.text.text
    return ends + collections.Counter(prefix_tokens=engine.speed.prefix_tokens)


COMPANY = [("alibi", 1), *(slowly(kind, 4) for kind in KINDS)]
COMPANY += [pytest.param(kind, 40, marks=pytest.mark.long) for kind in KINDS]


@pytest.mark.parametrize("kind, n_seeds", COMPANY)
def test_texts_are_those_of_the_one_text_loop(kind, n_seeds):
    seen = sum((compare(kind, seed, 24) for seed in range(2, 2 + n_seeds)), collections.Counter())
    assert seen["stop string"] and seen["max_new_tokens"] and not seen["error"]
    if n_seeds > 1:
        assert seen["cancelled"] and seen["end of text"] and seen["prefix_tokens"]
        assert (seen["max_seq_len"] > 0) == (kind == "learned")


def test_rows_are_shifted_when_the_columns_are_used_up():
    """To the left in a row, and to the right for a prompt that is more than twice as long."""
    decode = served()
    engine = Engine(decode, 2, max_tokens=60)
    many = [request("ab" * (i % 5), 50 - 5 * i, seed=i) for i in range(7)]
    finished(engine, *many)
    first, second = request("a", 40), request("x" * 30, 20)
    engine.submit(first)
    for _ in range(5):
        engine.step()
    finished(engine, second)
    assert_as_alone(decode, *many, first, second)


def test_a_shared_beginning_is_read_once():
    decode = served()
    engine = Engine(decode, prefix_bytes=10**7)
    stem = STEMS[2]
    both = [request(stem + "one"), request(stem + "two")]
    for one in both:
        finished(engine, one)
    assert engine.speed.prefix_tokens == len(stem) // BLOCK * BLOCK
    finished(engine, again := request(stem + "one"))
    assert_as_alone(decode, *both, again)


def test_beginnings_are_shared_within_a_bound():
    """Those that were used least recently go; a prompt beyond the bound is kept in part."""
    decode = served()
    of_block = 2 * 2 * BLOCK * 32 * 8  # k and v, layers, tokens, d_model, float64
    engine = Engine(decode, max_tokens=500, prefix_bytes=3 * of_block)
    for prompt in ("a" * 200, "b" * 40, "a" * 200, "c" * 40, "d" * 40):
        finished(engine, request(prompt, n=1))
        blocks = engine.batch.prefixes.blocks.values()
        assert sum(block.k.nbytes + block.v.nbytes for block in blocks) <= 3 * of_block
    # 200 tokens "a" left 3 blocks; "b" took the last of them; then it and "b" were replaced.
    assert engine.speed.prefix_tokens == 2 * BLOCK
    finished(engine, request("a" * 200, n=1))
    assert engine.speed.prefix_tokens == 3 * BLOCK


def test_a_beginning_belongs_to_its_adapter():
    loads = collections.Counter()

    def changing(cfg, name):
        """An adapter whose file is replaced between two loads."""
        loads[name] += 1
        return random_tensors(cfg, name if loads[name] == 1 else "e")

    decode = served(n_slots=1, read=changing)
    engine = Engine(decode, prefix_bytes=10**7)
    texts = {}
    for adapter in (BASE, "a", "a", "c", "a"):
        one = request(STEMS[2], n=20, adapter=adapter)
        finished(engine, one)
        assert_as_alone(decode, one)
        texts[tuple(one.text.ids)] = adapter
    assert loads["a"] == 2 and len(texts) == 4
    assert engine.speed.prefix_tokens == 2 * BLOCK  # the second of the five


def test_log_probabilities_are_those_of_the_model():
    """Before temperature, top-k and constraints."""
    decode = served()
    prompt = STEMS[2] + "the river"
    of_prompt = []
    wanting = request(
        prompt,
        6,
        Sampling(1.5, top_k=3),
        n_logprobs=4,
        constraint=Digits(),
        of_prompt=of_prompt,
    )
    beside = request("to be", 6, Sampling(), n_logprobs=0)
    engine = Engine(decode, chunk=MIN_COST, prefix_bytes=10**7)
    finished(engine, request(prompt))  # its beginning is known, and has to be read again
    events = finished(engine, wanting, beside, request("a"))
    reports = [event.logprobs for event in events if event.request is wanting]
    ids = wanting.text.ids
    assert len(reports) == 6 and len(of_prompt) == len(prompt) - 1
    for n, report in enumerate(of_prompt + reports, 1):
        with torch.inference_mode():
            log_p = decode.model(torch.tensor([ids[:n]]))[0, -1, :V].log_softmax(-1)
        values, tokens = log_p.topk(4)
        assert [token for token, _ in report.likeliest] == tokens.tolist()
        found = [report.of_token, *(value for _, value in report.likeliest)]
        assert found == pytest.approx([log_p[ids[n]].item(), *values.tolist()], abs=1e-5)
    assert all(event.logprobs.likeliest == [] for event in events if event.request is beside)
    assert any(event.logprobs is None for event in events)


# --- A constraint


class Digits:
    """Only digits; `fails`: at which call of which method it raises, or None."""

    def __init__(self, fails=None, allowed=b"0123456789"):
        self.fails, self.allowed, self.taken = fails, list(allowed), []

    def check(self, call):
        if self.fails == (call, len(self.taken)):
            raise RuntimeError("too deep")

    def mask(self):
        self.check("mask")
        allowed = torch.zeros(V, dtype=torch.uint8)
        allowed[self.allowed] = 1
        return allowed

    def accept(self, token):
        self.check("accept")
        self.taken.append(token)


def test_a_constraint_holds_for_its_text_and_no_other():
    decode = served()
    bound = [request("the river", 10, how, constraint=Digits()) for how in SAMPLINGS]
    free = [request("to be", 10, how, seed=seed) for seed, how in enumerate(SAMPLINGS)]
    finished(Engine(decode), *bound, *free)
    for one in bound:
        assert one.text.text.isdecimal() and len(one.text.text) == 10
        assert one.constraint.taken == list(one.text.text.encode())
    assert_as_alone(decode, *free)


# --- What goes wrong is one text's alone


def too_large(cfg, name):
    """Adapters in memory; of "huge" the products overflow, and "damaged" cannot be read."""
    if name == "damaged":
        raise UserError("damaged.safetensors is truncated")
    found = random_tensors(cfg, "a")
    if name == "huge":
        found.tensors = {key: tensor.double() * 1e200 for key, tensor in found.tensors.items()}
    return found


BAD = {
    "logits": ({"adapter": "huge"}, "the logits are not finite"),
    "adapter": ({"adapter": "damaged"}, "damaged.safetensors is truncated"),
    "mask": ({"constraint": Digits(("mask", 2))}, "too deep"),
    "accept": ({"constraint": Digits(("accept", 3))}, "too deep"),
    "no token": ({"constraint": Digits(allowed=b"")}, "allows no token"),
}


@pytest.mark.parametrize("more, message", BAD.values(), ids=BAD)
def test_a_text_that_fails_ends_alone_and_leaves_nothing_in_its_row(more, message):
    decode = served(read=too_large)
    engine = Engine(decode, n_rows=3, prefix_bytes=10**7)
    good = [request("x" * (3 + 30 * i), 12, seed=i, adapter=ADAPTERS[1 + i % 2]) for i in range(6)]
    bad = request("y" * 50, 12, **more)
    events = finished(engine, good[0], bad, *good[1:])
    assert bad.text.end == "error" and message in str(bad.error)
    assert [event.end for event in events if event.request is bad][-1] == "error"
    assert_as_alone(decode, *good)
    assert_nothing_is_held(engine)


def test_if_the_decoder_fails_all_running_texts_do_and_the_others_go_on():
    decode = served()
    calls = []

    def sometimes(ids, cache):
        calls.append(ids.shape)
        if len(calls) in (5, 20):
            raise MemoryError("no room")
        return decode(ids, cache)

    engine = Engine(decode, n_rows=3)
    names = ("model", "cfg", "device", "cache_dtype", "bank")
    known = {name: getattr(decode, name) for name in names}
    engine.batch.decoder = mock.Mock(side_effect=sometimes, **known)
    many = [request("x" * i, 8, adapter=ADAPTERS[i % 4]) for i in range(1, 10)]
    finished(engine, *many)
    failed = [one for one in many if one.text.end == "error"]
    assert 3 <= len(failed) <= 6 and {str(one.error) for one in failed} == {"no room"}
    assert_as_alone(decode, *(one for one in many if not one.error))
    assert_nothing_is_held(engine)


def test_what_can_never_be_served_is_refused_at_once():
    engine = Engine(decoder(tiny("alibi"), V), max_tokens=20)
    message = refusal(engine.submit, request("x" * 11, 10))
    assert "prompt (11 tokens) and max_new_tokens (10) are more than 20" in message
    assert "leave the adapter out" in refusal(engine.submit, request(adapter="a"))
    assert "max_new_tokens must be 1" in refusal(engine.submit, request(n=0))
    assert "n_logprobs must be 0" in refusal(engine.submit, request(n_logprobs=-1))
    assert "max_new_tokens (1000000000)" in refusal(engine.submit, request(n=10**9))
    assert not engine.is_busy
    finished(engine, one := request("x" * 10, 10))
    assert one.text.new_tokens == 10
    for bad in ({"temperature": -1}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": -0.1}):
        assert "top_p in [0, 1]" in refusal(Sampling, **bad)


# --- Who waits for whom


def test_an_adapter_that_loads_holds_nobody_up():
    may_end = threading.Event()

    def slow(cfg, name):
        assert name == "a" or may_end.wait(PATIENCE)
        return random_tensors(cfg, name)

    engine = Engine(served(read=slow), n_rows=2)
    finished(engine, request(adapter="a"))  # so it is loaded
    late, *others = [request(n=5, adapter=adapter) for adapter in ("b", BASE, "a", BASE)]
    for one in (late, *others):
        engine.submit(one)
    while not all(one.text.end for one in others):
        engine.step()
    assert late.text.new_tokens == 0
    may_end.set()
    finished(engine)
    assert_as_alone(engine.decoder, late, *others)


def test_a_step_reads_few_short_prompts_and_a_part_of_a_long_one():
    """What it costs the others is bounded."""
    engine = Engine(served(), 40, max_tokens=600, chunk=4 * MIN_COST, read_seconds=math.inf)
    first = request("a", 30)
    finished_soon = [request("b", 1) for _ in range(20)]
    for one in (first, *finished_soon):
        engine.submit(one)
    engine.step()
    assert engine.speed.prompts == 4
    for n_steps in range(1, 6):
        assert first.text.new_tokens == n_steps + 1
        engine.step()
    assert engine.speed.prompts == 21

    long = request("c" * 500, 1)
    engine.submit(long)
    for n_read in (128, 256, 384):
        engine.step()
        assert engine.n_read == n_read
    assert first.text.new_tokens == 10
    finished(engine)
    assert_as_alone(engine.decoder, first, long)


def test_on_a_slow_machine_a_step_reads_less():
    """While other texts wait for their next token."""
    engine = Engine(served(), n_rows=2, max_tokens=600, chunk=4 * MIN_COST, read_seconds=1e-9)
    first, long = request("a", 30), request("c" * 500, 1)
    engine.submit(first)
    engine.step()
    assert first.text.new_tokens == 2  # nobody waited
    engine.submit(long)
    for n_steps in range(1, 4):
        engine.step()
        assert engine.n_read == n_steps * MIN_COST
    finished(engine)
    assert_as_alone(engine.decoder, first, long)


def test_a_cancelled_text_is_gone_wherever_it_was():
    decode = served()
    engine = Engine(decode, n_rows=3, chunk=MIN_COST)
    running, kept, reading, loading, *waiting = [
        request("x" * n, 20, adapter="a") for n in (3, 4, 90, *[5] * 8)
    ]
    finished_one = request("done", 1)
    finished(engine, finished_one)
    engine.submit(running)
    engine.submit(kept)
    while len(engine.running) < 2:
        engine.step()
    for one in (reading, loading, *waiting):
        engine.submit(one)
    engine.step()
    assert engine.reading is reading and loading in engine.loading and engine.waiting
    gone = [running, reading, loading, waiting[-1]]
    for one in [*gone, finished_one, running]:
        engine.cancel(one)
    assert [event.end for event in engine.step() if event.request in gone] == ["cancelled"] * 4
    finished(engine)
    assert finished_one.text.end == "max_new_tokens"
    assert_as_alone(decode, kept, *waiting[:-1])
    assert_nothing_is_held(engine)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "cancel", "step", "step"]),
        st.integers(0, 60),  # tokens of a new prompt, or which text is cancelled
        st.integers(1, 12),  # new tokens
        st.sampled_from(ADAPTERS),
    ),
    max_size=40,
)


@settings(max_examples=12, deadline=None)
@given(moves=MOVES, n_rows=st.integers(1, 3), n_slots=st.integers(1, 3))
def test_nothing_leaks_and_everybody_is_served(moves, n_rows, n_slots):
    engine = Engine(served(n_slots=n_slots), n_rows, 80, chunk=MIN_COST, prefix_bytes=200_000)
    requests, ended = [], []
    for move, n, n_new, adapter in moves:
        if move == "submit":
            requests.append(request("x" * n, n_new, adapter=adapter))
            engine.submit(requests[-1])
        elif move == "cancel" and requests:
            engine.cancel(requests[n % len(requests)])
        elif move == "step":
            ended += [event.request for event in engine.step() if event.end]
        assert len(engine.running) == len(engine.batch.rows.pads) <= n_rows
    # Each step that finds an adapter loaded reads a chunk or adds a token to each text.
    steps = engine.speed.steps + sum(4 + one.text.max_new_tokens for one in requests)
    ended += [event.request for event in finished(engine) if event.end]
    assert engine.speed.steps <= steps
    assert collections.Counter(ended) == collections.Counter(requests)
    assert {one.text.end for one in requests} <= {"max_new_tokens", "end of text", "cancelled"}
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("kind", ["alibi", "window"])
def test_steps_are_counted(kind):
    engine = Engine(decoder(tiny(kind), V))
    finished(engine, request("abc", 5), request("a", 5))
    speed = engine.speed
    assert (speed.prompt_tokens, speed.prompts, speed.steps, speed.tokens) == (4, 2, 4, 8)
    # 3 tokens of the longer prompt, and one more in each step; 2 rows
    columns = [4, 5, 6, 6] if kind == "window" else [4, 5, 6, 7]  # 5 before a token's own
    assert speed.cached_tokens == 2 * sum(columns)
    assert speed.seconds > 0 and speed.prompt_seconds > 0


# --- The thread


def test_if_the_engine_itself_fails_nobody_waits_for_ever(monkeypatch):
    engine, delivered, seen = Engine(served()), [], []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    monkeypatch.setattr(engine, "decode", lambda: 1 / 0)
    thread = EngineThread(engine, delivered.extend)
    thread.submit(request())
    thread.thread.join(PATIENCE)
    assert delivered[-1].end == "error"
    assert seen[0].exc_type is ZeroDivisionError
    assert SHUTTING_DOWN in refusal(thread.submit, request())


def test_if_tensor_ranks_lose_each_other_all_texts_end_and_so_does_the_program(monkeypatch):
    engine, delivered, asked = Engine(served()), [], []

    def lose(*_):
        engine.batch.lost = ConnectionError("rank 1 is gone")
        raise engine.batch.lost

    monkeypatch.setattr(engine.batch, "decode", lose)
    monkeypatch.setattr(os, "kill", lambda *signalled: asked.append(signalled))
    thread = EngineThread(engine, delivered.extend)
    thread.submit(request())
    thread.thread.join(PATIENCE)
    assert not thread.thread.is_alive() and asked == [(os.getpid(), signal.SIGTERM)]
    assert delivered[-1].end == "error"
    assert SHUTTING_DOWN in refusal(thread.submit, request())

"""serving/step_graph.py: captured steps give the tokens of steps that are not.

On a CPU a recorder stands in for CUDA's graphs (tests/tracing/recorded.py), so all but the capture
itself runs here: static memory, buckets of rows and columns, what is hidden from whom.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from conftest import slowly
from test_decoder import KINDS as MODELS
from test_decoder import decoder, model, random_ids
from test_engine import (
    ADAPTERS,
    BASE,
    Digits,
    assert_as_alone,
    compare,
    finished,
    memory_of_nan,  # noqa: F401 (a fixture)
    request,
    served,
    too_large,
)
from tracing import recorded

import attention
from config import MPTConfig
from serving import step_graph
from serving.decoder import generate
from serving.engine import Engine
from serving.sampling import Sampling

pytestmark = pytest.mark.usefixtures("one_thread", "memory_of_nan")


@pytest.fixture
def made(monkeypatch):
    """Steps are captured, by the recorder. Returns all graphs so far. The first has 8 columns."""
    graphs = []

    class Graph(recorded.Graph):
        def __init__(self):
            super().__init__()
            graphs.append(self)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recorded.graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(step_graph, "suits", lambda decoder: True)
    monkeypatch.setattr(step_graph, "FEWEST_COLUMNS", 8)
    return graphs


@pytest.fixture
def in_engines(made, monkeypatch):
    """Only those of an engine; a text alone is written as on a CPU."""
    monkeypatch.setattr(step_graph, "borrow", lambda *_: None)
    return made


@pytest.mark.parametrize("kind", ["alibi", slowly("learned")])
def test_engines_write_the_texts_of_the_one_text_loop(kind, in_engines):
    """Random joins, leaves, shifts, adapters, sampling: as tests/serving/test_engine.py."""
    seen = compare(kind, 2, 24)
    assert seen["stop string"] and seen["max_new_tokens"] and not seen["error"]
    assert len(in_engines) >= 4


def prompt_and_pads(n_rows: int):
    return random_ids((n_rows, 5), seed=n_rows), torch.arange(n_rows) % 5


# Steps with soft-capped scores are not captured.
CASES = [(3, more | {"attn_logit_softcapping": None}) for more in MODELS.values()]
CASES += [(n_rows, MODELS["alibi"]) for n_rows in (1, 2, 4, 5, 8, 9)]


@pytest.mark.parametrize("n_rows, more", CASES, ids=str)
def test_every_bucket_of_rows_and_columns(n_rows, more, made, monkeypatch):
    """In fp32. Columns 5 to 23 are in buckets that end with 8, 16 and the last one."""
    ids, pad = prompt_and_pads(n_rows)
    settings = {"pad": pad, "temperature": 0}
    captured = list(generate(decoder(model(**more)), ids, 19, **settings))
    assert [graph.n_replays for graph in made] == [3, 8, 7]
    monkeypatch.setattr(step_graph, "suits", lambda decoder: False)
    wanted = list(generate(decoder(model(**more)), ids, 19, **settings))
    assert torch.equal(torch.stack(captured), torch.stack(wanted))


@pytest.mark.parametrize(
    "positions", [{"alibi": True}, {"rope": True, "sliding_window_size": 6}], ids=str
)
def test_logits_are_those_of_a_step_that_is_not_captured(positions, made):
    """In fp64 up to rounding, left and right of each bucket's edge."""
    decode = decoder(model(kv_n_heads=2, **positions).double())
    ids, pad = prompt_and_pads(3)
    graphs = step_graph.borrow(decode, 4, 40)
    cache, plain = graphs.empty(3, pad), decode.model.new_cache(3, 40, torch.float64, pad)
    with torch.inference_mode():
        decode(ids, cache)
        decode(ids, plain)
        for column in range(5, 40):
            ids = random_ids((3, 1), seed=column)
            torch.testing.assert_close(graphs(ids, cache), decode(ids, plain), atol=1e-12, rtol=0)
    assert [key[1] for key in graphs.graphs] == [8, 16, 32, 40]


@pytest.mark.parametrize(
    "more, dtype, team, is_captured",
    [
        ({"sliding_window_size": 6}, torch.float32, None, True),  # SDPA with a mask
        ({"sliding_window_size": 6}, torch.float32, "two tensor ranks", False),
        ({"attn_logit_softcapping": 30.0}, torch.bfloat16, None, True),  # the kernel
        ({"attn_logit_softcapping": 30.0}, torch.float32, None, False),
    ],
    ids=str,
)
def test_steps_are_captured_where_attention_can_hide_columns(
    more, dtype, team, is_captured, monkeypatch
):
    def in_16_bits(impl, device, dtype, *rest, **named):
        """As `attention.choose` on an H100."""
        return "triton" if dtype == torch.bfloat16 else "sdpa"

    monkeypatch.setattr(attention, "choose", in_16_bits)
    gpu = torch.device("cuda", 0)
    cfg = MPTConfig(**more)
    decode = SimpleNamespace(device=gpu, cache_dtype=dtype, cfg=cfg, team=team)
    assert step_graph.suits(decode) == is_captured


def test_generate_keeps_its_graphs_and_two_at_a_time_do_not_share_memory(made):
    decode = decoder(model(alibi=True))
    ids, pad = prompt_and_pads(2)
    wanted = list(generate(decode, ids, 10, pad=pad, temperature=0))
    n_graphs = len(made)
    calls = [generate(decode, ids, 10, pad=pad, temperature=0) for _ in range(2)]
    for *both, expected in zip(*calls, wanted, strict=True):
        assert all(torch.equal(token, expected) for token in both)
    assert len(made) == 2 * n_graphs  # the first call's, and others
    with torch.inference_mode():
        for kv in (decode.graphs.memory.k, decode.graphs.memory.v):
            kv.fill_(torch.nan)  # as a text leaves it whose numbers overflow
    again = list(generate(decode, ids, 10, pad=pad, temperature=0))
    assert torch.equal(torch.stack(again), torch.stack(wanted))
    list(generate(decode, ids[:1], 10, temperature=0))
    assert {len(key) for key in decode.graphs.graphs} == {3}


@pytest.mark.parametrize("adapters", [["a"] * 3, ["a", "b", BASE], [BASE] * 3], ids=str)
def test_adapters(adapters, in_engines):
    """All rows with one, with several, with none: other graphs."""
    decode = served()
    engine = Engine(decode, n_rows=4, max_tokens=60)
    texts = [request("x" * (3 + 7 * i), 12, adapter=a, seed=i) for i, a in enumerate(adapters)]
    finished(engine, *texts)
    assert_as_alone(decode, *texts)
    slots = {key[2] for key in engine.batch.rows.graphs.graphs}
    expected = {1: 0 if adapters[0] == BASE else 1, 3: 4}[len(set(adapters))]
    assert expected in slots


def test_what_a_failed_text_leaves_behind_is_hidden(in_engines):
    decode = served(read=too_large)
    engine = Engine(decode, n_rows=3)
    good = [request("x" * (3 + 30 * i), 12, seed=i, adapter=ADAPTERS[1 + i % 2]) for i in range(4)]
    bad = request("y" * 50, 12, adapter="huge")
    finished(engine, good[0], bad, *good[1:])
    assert bad.text.end == "error" and "the logits are not finite" in str(bad.error)
    assert_as_alone(decode, *good)
    short = [request("z" * (1 + i), 20) for i in range(3)]  # in the same rows
    finished(engine, *short)
    assert_as_alone(decode, *short)


def test_a_row_is_clean_after_a_text_that_failed(in_engines):
    """It may leave NaN, also in columns that a shorter text has not reached yet."""
    decode = served()
    engine = Engine(decode, n_rows=1)
    finished(engine, request("y" * 50, 12))
    for kv in (engine.batch.rows.cache.k, engine.batch.rows.cache.v):
        kv[:, 0, :, :60] = torch.nan
    finished(engine, short := request("z", 12))
    assert_as_alone(decode, short)


def test_constraints_and_log_probabilities(in_engines):
    decode = served()
    bound = request("the river", 10, Sampling(0.8), constraint=Digits(), n_logprobs=2)
    free = request("to be", 10, n_logprobs=0)
    events = finished(Engine(decode), bound, free)
    assert bound.text.text.isdecimal() and len(bound.text.text) == 10
    assert all(event.logprobs for event in events)
    assert_as_alone(decode, free)


def test_few_graphs_are_kept(in_engines, monkeypatch):
    monkeypatch.setattr(step_graph, "MOST_GRAPHS", 2)
    decode = served("learned")
    engine = Engine(decode, n_rows=8, max_tokens=110)
    texts = [request("x" * (9 * i), 5 + 5 * i, kind="learned", seed=i) for i in range(8)]
    for one in texts:
        engine.submit(one)
    while engine.is_busy:
        engine.step()
        assert len(engine.batch.rows.graphs.graphs) <= 2
    assert_as_alone(decode, *texts)
    assert len(in_engines) > 4


def test_where_capture_fails_steps_run_as_they_are(in_engines, monkeypatch, capsys):
    def refuse(*args, **settings):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    decode = served()
    texts = [request("x" * (20 * i), 20, seed=i) for i in range(4)]
    finished(Engine(decode, n_rows=2, max_tokens=100), *texts)
    assert_as_alone(decode, *texts)
    (line,) = capsys.readouterr().err.splitlines()
    assert "no CUDA graph can be captured: operation not permitted" in line


def test_after_a_capture_that_fails_work_goes_on_in_its_stream(in_engines, monkeypatch):
    """If a capture's end fails, torch.cuda.graph does not go back to the stream before it."""
    stream = "the default one"

    def set_stream(other):
        nonlocal stream
        stream = other

    @contextlib.contextmanager
    def within(other):
        before = stream
        set_stream(other)
        try:
            yield
        finally:
            set_stream(before)

    @contextlib.contextmanager
    def refuse(*args, **settings):
        set_stream("the captures' own")
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    text = request("the river", 3)
    finished(Engine(served()), text)
    assert text.text.end == "max_new_tokens" and stream == "the default one"


def test_a_recorder_replays_what_a_graph_would():
    """It has teeth: a number of Python's stays as it was, and results are undefined at first."""
    x, graph = torch.ones(3), recorded.Graph()
    factor = 2
    with recorded.graph(graph):
        y = x * factor
    assert y.isnan().all()
    x.fill_(5)
    factor = 7
    graph.replay()
    assert y.tolist() == [10, 10, 10]

"""planning/search.py: all layouts side by side, the fastest of them, MPT's proportions."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

import devices
from config import SHARDING_MODES, MPTConfig, TrainConfig, stage_sizes
from planning import budget, memory, search, step_time
from planning.fleet import Fleet
from planning.search import LayoutArgs, Question
from program import UserError


def test_shapes_are_mpts():
    layers_of = {1024: 24, 2048: 24, 2560: 32, 4096: 32, 7168: 48}
    for width, layers in layers_of.items():
        m = budget.shape(width, MPTConfig())
        assert (m.n_heads, m.n_layers) == (width // 128, layers)


OPEN = LayoutArgs()


def mpt1b_on(n: int, asked=OPEN, **settings) -> Question:
    """MPT-1B on n devices."""
    cfg = TrainConfig(global_batch_size=256, **settings)
    return Question(MPTConfig(), cfg, asked, Fleet(devices.by_name("mi250"), n))


def random_question(seed: int) -> Question:
    """A model, a batch, and a fleet of up to 32 devices, on some of which nothing fits."""
    draw = random.Random(seed)
    heads = draw.choice([8, 12, 16, 32, 64])
    m = MPTConfig(
        d_model=heads * draw.choice([64, 128]),
        n_heads=heads,
        n_layers=draw.choice([8, 12, 13, 24, 32]),
        max_seq_len=draw.choice([1024, 2048, 4096]),
        attn_impl="sdpa",
    )
    kind = devices.by_name(draw.choice(["a100", "h100", "mi250", "mi300x", "4090"]))
    n = draw.choice([2, 4, 8, 8, 12, 16, 24, 32])
    fleet = Fleet(kind, n, draw.choice([4, 8]), network_gbs=draw.choice([12.5, 50, 200, 400]))
    batch = n * draw.choice([1, 2, 3])
    return Question(m, TrainConfig(global_batch_size=batch), LayoutArgs(), fleet)


def all_layouts(m, cfg, fleet) -> Iterator[TrainConfig]:
    """Every layout: plain loops."""
    n = fleet.devices
    recomputations = {("none", 1)}
    for mode, k in itertools.product(["selective", "full"], (8, 6, 5, 4, 3, 2, 1)):
        recomputations.add((mode, min(k, m.n_layers)))
    for tp, pp in itertools.product(range(1, fleet.node_size + 1), range(1, m.n_layers + 1)):
        if n % (tp * pp) or tp not in m.tensor_ranks or cfg.global_batch_size % (n // (tp * pp)):
            continue
        if min(fleet.node_size, n) % tp:  # a team would be on two nodes
            continue
        dp = n // (tp * pp)
        cfg = replace(cfg, tp=tp, pp=pp)
        node = fleet.node_size // tp
        sizes = range(1, cfg.global_batch_size // dp + 1)
        for mode, (again, k) in itertools.product(SHARDING_MODES, recomputations):
            if mode == "HYBRID_SHARD" and (dp <= node or dp % node):
                continue
            if any(size % k for size in stage_sizes(m.n_layers, pp)) and pp > 1:
                continue  # some stages would recompute more than others
            layout = replace(cfg, sharding=mode, shard_size=node if mode == "HYBRID_SHARD" else 0)
            layout = replace(layout, activation_checkpointing=again, recompute_every=k)
            in_sequence = [False, True] if tp > 1 and m.max_seq_len % tp == 0 else [False]
            for size, cuts_tokens in itertools.product(sizes, in_sequence):
                yield replace(layout, microbatch_size=size, sequence_parallel=cuts_tokens)


def exhaustive(q: Question) -> float | None:
    """Tokens/s of the fastest of all layouts that fit, the fastest asked first."""
    rates = []
    for layout in all_layouts(q.m, q.cfg, q.fleet):
        rates.append((step_time.tokens_per_second(q.m, layout, q.fleet), layout))
    rates.sort(key=lambda pair: -pair[0])
    limit = memory.ROOM * q.fleet.device.memory_gb * 2**30
    for rate, layout in rates:
        if memory.bytes_by_part(q.m, layout, q.fleet.devices)["peak"] <= limit:
            return rate
    return None


# A few are quick, some slow.
QUICK = {6, 31}
SLOW = {1, 2, 3, 4, 5, 7, 8, 9, 13}
SEEDS = [
    *QUICK,
    *[pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW],
    *[pytest.param(seed, marks=pytest.mark.long) for seed in set(range(40)) - SLOW - QUICK],
]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_choice_is_that_of_an_exhaustive_search(seed):
    """By the same model of seconds and bytes, within 3 %."""
    question = random_question(seed)
    rate = exhaustive(question)
    if rate is None:
        with pytest.raises(UserError, match="do not fit"):
            search.fastest(question)
        return
    plan = search.fastest(question)
    assert plan.fits
    assert 0.97 * rate <= plan.tokens_per_second <= (1 + 1e-9) * rate


def test_what_is_asked_is_kept():
    """Groups of ranks need several nodes, and divide the ranks."""
    asked = LayoutArgs(
        tp=2, microbatch_size=2, activation_checkpointing="selective", recompute_every=3
    )
    plans = search.best(mpt1b_on(16, replace(asked, pp=1)), n=9)
    for plan in plans:
        assert (plan.cfg.tp, plan.cfg.pp, plan.cfg.microbatch_size) == (2, 1, 2)
        assert (plan.cfg.activation_checkpointing, plan.cfg.recompute_every) == ("selective", 3)
    assert {plan.cfg.sharding for plan in plans} == set(SHARDING_MODES)
    assert {plan.cfg.shard_size for plan in plans if plan.cfg.sharding == "HYBRID_SHARD"} == {4}
    plans = search.best(mpt1b_on(8, replace(asked, pp=1)), n=9)
    assert "HYBRID_SHARD" not in {plan.cfg.sharding for plan in plans}

    # 48 data-parallel ranks are three groups of 16; 24 or 12 are none.
    q = mpt1b_on(48, LayoutArgs(sharding="HYBRID_SHARD"), shard_size=16)
    q = replace(q, cfg=replace(q.cfg, global_batch_size=96))
    assert {plan.dp for plan in search.best(q, n=99)} == {48, 16}


def test_sequence_parallelism_is_tried_where_nobody_sets_it():
    """And kept where somebody does. Where the tokens do not divide, it is not."""
    rates = {}
    for value in (False, True, "auto"):
        asked = LayoutArgs(tp=4, pp=1, sharding="ZERO1", sequence_parallel=value)
        plan = search.fastest(mpt1b_on(8, asked))
        rates[value] = plan.tokens_per_second
        assert value in ("auto", plan.cfg.sequence_parallel)
    assert rates["auto"] == max(rates[False], rates[True]) > min(rates[False], rates[True])
    odd = replace(mpt1b_on(8, asked), m=MPTConfig(max_seq_len=2047))
    assert not search.fastest(odd).cfg.sequence_parallel


@pytest.mark.parametrize("pp, expected", [(1, {4, 2, 1}), (4, {2, 1}), (5, {1})])
def test_all_stages_recompute_as_much(pp, expected):
    q = replace(mpt1b_on(8), m=MPTConfig(n_layers=24))
    assert {k for mode, k in search.recomputations(q, pp) if mode != "none"} == expected


def test_adapters_that_leave_the_first_stage_idle_are_not_cut_into_stages():
    q = mpt1b_on(8, lora_rank=8, init_from="x", lora_last_blocks=12)
    assert {plan.cfg.pp for plan in search.best(q, n=20)} == {1}

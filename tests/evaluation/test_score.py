"""evaluation/score.py: every score equals that of one request at a time, however requests share their beginnings."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import processes
from config import MPTConfig
from evaluation import score as icl_score
from evaluation.score import Group, Request, batched, grouped, score
from model import MPT, init_weights

ALONE = processes.World(0, 1, 0, 1, torch.device("cpu"))


def model(**more):
    shape = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 300, "max_seq_len": 64}
    mpt = MPT(MPTConfig(**shape | more))
    init_weights(mpt, seed=0)
    return mpt.eval()


def request(ids, count):
    return Request(np.array(ids, dtype=np.int64), count)


def alone(mpt, row):
    """[sum of log-probabilities, is every token the likeliest?], from all logits of one sequence."""
    ids = torch.from_numpy(row.ids)
    with torch.no_grad():
        logits = mpt(ids[None, :-1])[0, -row.count :].double()
    wanted = ids[-row.count :]
    total = F.log_softmax(logits, dim=-1).gather(1, wanted[:, None]).sum().item()
    return [total, float((logits.argmax(-1) == wanted).all())]


def alike(seed, n=40):
    """Requests that begin like others, by a little or by much, and continuations that begin inside or behind that."""
    draw, rows = random.Random(seed), []
    for _ in range(n):
        kept = draw.choice(rows).ids.tolist() if rows and draw.random() < 0.8 else []
        kept = kept[: draw.randint(0, len(kept))]
        ids = (kept + [draw.randrange(300) for _ in range(draw.randint(2, 20))])[
            :65
        ]  # 64 inputs at most
        rows.append(request(ids, draw.randint(1, len(ids) - 1)))
    return rows


@pytest.mark.parametrize("more", [{"alibi": True}, {}, {"rope": True, "kv_n_heads": 2}], ids=str)
@pytest.mark.parametrize("batch_tokens", [70, 1000])
def test_scores_equal_those_of_one_request_at_a_time(more, batch_tokens):
    mpt, rows = model(**more), alike(seed=batch_tokens)
    for row in rows[::3]:  # some continuations are the likeliest
        with torch.no_grad():
            row.ids[-1] = mpt(torch.from_numpy(row.ids)[None, :-1])[0, -1].argmax()
        row.count = 1
    groups = grouped(range(len(rows)), rows, batch_tokens)
    inside = [
        rows[i].count > len(rows[i].ids) - g.shared for g in groups if g.shared for i in g.numbers
    ]
    assert any(inside) and not all(inside)  # beginnings hold parts of continuations, and do not
    found = score(mpt, rows, ALONE, "fp32", batch_tokens)
    expected = torch.tensor([alone(mpt, row) for row in rows], dtype=torch.float64)
    assert 10 < expected[:, 1].sum() < 40
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_what_begins_alike_is_grouped_where_that_pays():
    long, other = list(range(100, 120)), list(range(200, 220))
    rows = [
        request([*long, 1, 2, 3], 3),
        request([*long, 1, 2, 7, 7], 4),  # 22 ids as the one before
        request([*other, 1], 1),
        request([*long, 9], 1),
        request([5, 6, 1, 2, 3], 3),
        request([5, 6, 3, 2, 1], 3),  # 2 ids as the one before: not worth a pass
    ]
    groups = grouped(range(6), rows, 1000)
    assert groups == [Group([4]), Group([5]), Group([0, 1, 3], 20), Group([2])]
    assert grouped([], rows, 1000) == []
    assert Group([0, 1], 22) in grouped(range(6), rows, 50)  # a third row of 23 ids would not fit
    assert grouped([0, 0], rows, 1000) == [
        Group([0, 0], 22)
    ]  # equal ones: their last id is left for the second pass


def test_a_beginning_is_read_once():
    rows, mpt, seen = (
        [request([*range(20), 30 + i, 40 + i], 2) for i in range(3)],
        model(alibi=True),
        [],
    )
    hook = mpt.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    score(mpt, rows, ALONE, "fp32", 1000)
    hook.remove()
    assert seen == [
        (1, 19),
        (3, 2),
    ]  # what is shared but its last token, then that and the continuations


@pytest.mark.parametrize("seed", range(4))
def test_batches_hold_each_request_once_fit_and_have_little_padding(seed):
    rows = alike(seed, n=300)
    groups = grouped(range(300), rows, 400)
    assert sorted(i for group in groups for i in group.numbers) == list(range(300))
    for group in groups:
        assert len({rows[i].ids[: group.shared].tobytes() for i in group.numbers}) == 1
    for kind in ([g for g in groups if g.shared], [g for g in groups if not g.shared]):
        batches = batched(kind, rows, 400, 64)
        assert sorted(map(str, kind)) == sorted(str(group) for batch in batches for group in batch)
        assert len(batches) < (0.8 if kind[0].shared else 0.3) * len(kind)
        for batch in batches:
            rests = [len(rows[i].ids) - group.shared for group in batch for i in group.numbers]
            width = max(group.shared for group in batch) + max(rests) - 1
            assert width <= 64 and (len(rests) * width <= 400 or len(batch) == 1)
            tokens = sum(rests) + sum(group.shared for group in batch)
            padded = len(rests) * max(rests) + len(batch) * max(group.shared for group in batch)
            assert padded <= tokens * 4 / 3 or len(batch) == 1


def test_greedy_means_every_token_is_the_likeliest():
    mpt, ids = model(alibi=True), [5, 6, 7]
    for _ in range(4):
        with torch.no_grad():
            ids.append(mpt(torch.tensor([ids]))[0, -1].argmax().item())
    early, late = [*ids[:3], ids[3] + 1, *ids[4:]], [*ids[:-1], ids[-1] + 1]
    found = score(mpt, [request(row, 4) for row in (ids, early, late)], ALONE, "fp32", 100)
    assert found[:, 1].tolist() == [
        1,
        0,
        0,
    ]  # the first and the last share a beginning, which is scored


def test_a_request_is_known_by_its_ids_and_count():
    assert request([1, 2, 3], 1).key == request([1, 2, 3], 1).key
    assert (
        len({request([1, 2, 3], 1).key, request([1, 2, 3], 2).key, request([1, 2, 4], 1).key}) == 3
    )
    assert icl_score.common(np.array([1, 2, 3]), np.array([1, 2, 3])) == 3
    assert icl_score.common(np.array([1, 2, 3, 4]), np.array([1, 5, 3])) == 1

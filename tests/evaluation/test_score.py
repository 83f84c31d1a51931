"""evaluation/score.py: scores equal those of one request at a time, whatever requests share."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import processes
from config import MPTConfig
from evaluation.score import Group, Request, all_batches, grouped, score
from model import MPT, init_weights

ALONE = processes.World(0, 1, 0, 1, torch.device("cpu"))


def model(**more):
    """A tiny model of random weights."""
    shape = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 300, "max_seq_len": 64}
    mpt = MPT(MPTConfig(**shape | more))
    init_weights(mpt, seed=0)
    return mpt.eval()


def request(ids, count):
    """A Request from a list of ids."""
    return Request(np.array(ids, dtype=np.int64), count)


def alone(mpt, row):
    """[sum of log-probabilities, is every token the likeliest?], from all logits of a sequence."""
    ids = torch.from_numpy(row.ids)
    with torch.no_grad():
        logits = mpt(ids[None, :-1])[0, -row.count :].double()
    labels = ids[-row.count :]
    log_probs = F.log_softmax(logits, dim=-1).gather(1, labels[:, None])
    return [log_probs.sum().item(), float((logits.argmax(-1) == labels).all())]


def alike(seed, n=40):
    """Requests of which several have one context, short or long, and others one of their own."""
    draw = random.Random(seed)
    contexts = [ids_of(draw, draw.randint(1, 45)) for _ in range(n // 2)]
    rows = []
    for _ in range(n):
        continuation = ids_of(draw, draw.randint(1, 20))
        rows.append(request(draw.choice(contexts) + continuation, len(continuation)))
    return rows


def ids_of(draw, n):
    """n random ids."""
    return [draw.randrange(300) for _ in range(n)]


def make_likeliest(mpt, row):
    """Let its continuation be one id, the likeliest."""
    row.ids = row.ids[: len(row.ids) - row.count + 1]
    row.count = 1
    with torch.no_grad():
        row.ids[-1] = mpt(torch.from_numpy(row.ids)[None, :-1])[0, -1].argmax()


LLAMA_LIKE = {
    "rope": True,
    "kv_n_heads": 2,
    "qk_gn": True,
    "sliding_window_size": 7,
    "attn_logit_softcapping": 0.5,
    "ffn_type": "mptglu",
    "norm_type": "rmsnorm",
    "final_logit_softcapping": 0.7,
}
KINDS = [{"alibi": True}, {}, {"rope": True, "kv_n_heads": 2}, LLAMA_LIKE]


@pytest.mark.parametrize("more", KINDS, ids=["alibi", "learned", "rope", "llama-like"])
@pytest.mark.parametrize("batch_tokens", [70, 1000])
def test_scores_equal_those_of_one_request_at_a_time(more, batch_tokens):
    mpt = model(**more)
    rows = alike(seed=batch_tokens)
    for row in rows[::3]:
        make_likeliest(mpt, row)

    groups = grouped(rows, batch_tokens)
    assert {bool(group.shared) for group in groups} == {True, False}  # the test sees both cases

    scores = score(mpt, rows, ALONE, "fp32", batch_tokens)
    expected = torch.tensor([alone(mpt, row) for row in rows], dtype=torch.float64)
    assert 10 < expected[:, 1].sum() < 40
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-5)


def test_what_has_one_context_is_grouped_where_that_fits_and_pays():
    long = list(range(100, 120))
    rows = [
        request([*long, 1, 2, 3], 3),
        request([5, 6, 1, 2, 3], 3),
        request([*long, 1, 2, 7, 7], 4),
        request([*long, 9], 2),  # a shorter context
        request([5, 6, 3, 2, 1], 3),  # two ids are not worth a pass
    ]
    assert grouped(rows, 1000) == [Group([0, 2], 20), Group([1]), Group([4]), Group([3])]
    assert grouped(rows, 45) == [Group([i]) for i in (0, 2, 1, 4, 3)]
    three = [request([*long, i, i], 2) for i in range(3)]
    assert grouped(three, 50) == [Group([0, 1], 20), Group([2])]
    assert grouped([], 1000) == []


def test_a_context_is_read_once():
    rows = [request([*range(20), 30 + i, 40 + i], 2) for i in range(3)]
    mpt = model(alibi=True)
    shapes = []
    hook = mpt.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    score(mpt, rows, ALONE, "fp32", 1000)
    hook.remove()
    # The context but its last token, once; then that token and the inputs of each continuation.
    assert shapes == [(1, 19), (3, 2)]


def test_batches_hold_each_request_once_fit_and_have_little_padding():
    rows = alike(seed=0, n=300)
    groups = grouped(rows, 400)
    assert sorted(i for group in groups for i in group.indices) == list(range(300))
    for group in groups:
        assert len({rows[i].ids[: group.shared].tobytes() for i in group.indices}) == 1

    several, single = all_batches(rows, 400, 64)
    in_batches = [group for batch in several + single for group in batch]
    assert sorted(map(str, in_batches)) == sorted(map(str, groups))
    assert all(group.shared for batch in several for group in batch)
    assert not any(group.shared for batch in single for group in batch)
    assert len(several) < 0.8 * sum(map(len, several))
    assert len(single) < 0.3 * sum(map(len, single))

    for batch in several + single:
        suffixes = [len(rows[i].ids) - group.shared for group in batch for i in group.indices]
        prefixes = [group.shared for group in batch]
        width = max(prefixes) + max(suffixes) - 1
        assert width <= 64
        if len(batch) > 1:
            tokens = sum(suffixes) + sum(prefixes)
            padded = len(suffixes) * max(suffixes) + len(batch) * max(prefixes)
            assert len(suffixes) * width <= 400
            assert padded <= tokens * 4 / 3


def test_greedy_means_every_token_is_the_likeliest():
    mpt = model(alibi=True)
    ids = [5, 6, 7]
    for _ in range(4):
        with torch.no_grad():
            ids.append(mpt(torch.tensor([ids]))[0, -1].argmax().item())
    first_wrong = [*ids[:3], ids[3] + 1, *ids[4:]]
    last_wrong = [*ids[:-1], ids[-1] + 1]
    rows = [request(row, 4) for row in (ids, first_wrong, last_wrong)]
    scores = score(mpt, rows, ALONE, "fp32", 100)
    assert scores[:, 1].tolist() == [1, 0, 0]

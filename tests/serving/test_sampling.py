"""serving/sampling.py: temperature, top-k, top-p, and the numbers that draw a text."""

import itertools

import pytest
import torch

from serving.sampling import sample


def shares(logits, n=20_000, **settings):
    """The share of each token when u takes n values, evenly spread over [0, 1)."""
    u = (torch.arange(n) + 0.5) / n
    drawn = sample(torch.tensor(logits).repeat(n, 1), uniform=u, **settings)
    return (torch.bincount(drawn, minlength=len(logits)) / n).tolist()


def by_hand(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The same with lists: sort, keep k tokens, keep tokens until p is reached, normalize."""
    weights = [2.718281828459045 ** (x / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])[: top_k or len(logits)]
    total = sum(weights[i] for i in order)
    kept = []
    probability = 0.0
    while order and probability < top_p:
        kept.append(order.pop(0))
        probability += weights[kept[-1]] / total
    kept_weight = sum(weights[i] for i in kept)
    return [weights[i] / kept_weight if i in kept else 0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_cuts_equal_a_computation_with_lists(temperature):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)).tolist()
    for top_k, top_p in itertools.product([0, 1, 3, 12, 99], [1.0, 0.9, 0.5, 0.01]):
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        assert shares(logits, **settings) == pytest.approx(by_hand(logits, **settings), abs=2e-4)


def test_known_distributions():
    logits = torch.tensor([0.2, 0.5, 0.3]).log().tolist()
    last_two = pytest.approx([0, 0.625, 0.375], abs=1e-3)
    assert shares(logits) == pytest.approx([0.2, 0.5, 0.3], abs=1e-3)
    assert shares(logits, top_k=2) == last_two
    assert shares(logits, top_p=0.6) == last_two  # 0.5 < 0.6, so the second one stays, too
    assert shares(logits, top_k=2, top_p=0.6) == [0, 1, 0]  # 0.5 is 0.625 of the two: enough
    assert shares(logits, temperature=0) == [0, 1, 0]


def test_where_the_sum_meets_top_p_exactly_no_further_token_stays():
    """Four tokens of 0.25: two have 0.5, which is enough."""
    kept = shares([0.0] * 4, top_p=0.5)
    assert sorted(kept) == pytest.approx([0, 0, 0.5, 0.5], abs=1e-3)


def test_without_numbers_torch_draws():
    torch.manual_seed(0)
    drawn = sample(torch.tensor([0.5, 0.3, 0.2]).log().repeat(20_000, 1))
    assert (torch.bincount(drawn) / 20_000).tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.02)


@pytest.mark.parametrize("settings", [{}, {"top_k": 40_000}, {"top_p": 0.999}], ids=str)
def test_the_largest_number_draws_a_token_that_can_be_drawn(settings):
    """Rounding in the sum must not reach the tokens after it, whose probability is 0."""
    logits = torch.full((1, 50_000), -torch.inf)
    logits[0, :30_000] = torch.randn(30_000, generator=torch.Generator().manual_seed(0))
    token = sample(logits, uniform=torch.tensor([1 - 2**-24]), **settings)
    assert logits[0, token].isfinite()


def test_rows_are_drawn_each_by_its_own_number():
    logits = torch.zeros(4, 4)
    assert sample(logits, uniform=torch.tensor([0.0, 0.3, 0.6, 0.9])).tolist() == [0, 1, 2, 3]


def test_the_smallest_numbers_leave_the_likeliest():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(1))
    smallest = [{"top_p": value} for value in (0, 1e-300, 1e-46, 1e-30)]
    smallest += [{"temperature": value} for value in (1e-300, 1e-40)]
    for settings in smallest:
        drawn = sample(logits, **settings, uniform=uniform)
        assert torch.equal(drawn, logits.argmax(dim=-1)), settings

"""Sampling: the cache, the cuts of the distribution, and the program on a run folder."""

import pytest
import torch
from conftest import flags_for, launch

from config import MPTConfig
from generate import generate, sample
from model import MPT, init_weights

TINY = dict(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=24)


def model(**more):
    mpt = MPT(MPTConfig(**TINY, **more)).eval()
    init_weights(mpt, seed=0)
    return mpt


@pytest.mark.parametrize("more", [{"alibi": True}, {}, {"alibi": True, "kv_n_heads": 2}], ids=str)
def test_greedy_sampling_equals_the_argmax_of_the_whole_sequence(more):
    mpt = model(**more)
    ids = torch.arange(6).view(2, 3)
    for token in list(generate(mpt, ids, 12, vocab_size=64, temperature=0)):
        with torch.no_grad():
            assert torch.equal(token, mpt(ids)[:, -1].argmax(-1))
        ids = torch.cat([ids, token[:, None]], dim=1)
    assert ids.shape == (2, 15)


def test_learned_positions_end_and_alibi_goes_on():
    ids = torch.zeros(1, 20, dtype=torch.long)
    assert len(list(generate(model(), ids, 100, vocab_size=64))) == 24 - 20 + 1
    assert len(list(generate(model(alibi=True), ids, 100, vocab_size=64))) == 100


def test_padding_rows_of_the_vocabulary_are_never_drawn():
    tokens = generate(model(alibi=True), torch.zeros(64, 1, dtype=torch.long), 8, vocab_size=5, temperature=5.0)
    assert torch.stack(list(tokens)).max() < 5


def frequencies(logits, **how):
    torch.manual_seed(0)
    draws = sample(torch.tensor(logits).repeat(20_000, 1), **how)
    return (torch.bincount(draws, minlength=len(logits)) / len(draws)).tolist()


def test_sample_follows_the_distribution():
    probs = torch.tensor([0.5, 0.3, 0.2])
    assert frequencies(probs.log().tolist()) == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    sharper = (probs**2 / (probs**2).sum()).tolist()
    assert frequencies(probs.log().tolist(), temperature=0.5) == pytest.approx(sharper, abs=0.02)


def test_top_k_and_top_p_cut_and_renormalise():
    logits = torch.tensor([0.2, 0.5, 0.3]).log().tolist()
    assert frequencies(logits, top_k=2) == pytest.approx([0, 0.625, 0.375], abs=0.02)
    assert frequencies(logits, top_k=1) == [0, 1, 0]
    assert frequencies(logits, top_p=0.6) == pytest.approx([0, 0.625, 0.375], abs=0.02)  # 0.5 < 0.6: the second too
    assert frequencies(logits, top_p=0.1) == [0, 1, 0]
    assert frequencies(logits, temperature=0) == [0, 1, 0]


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory):
    """A run folder of two steps over bytes."""
    folder = tmp_path_factory.mktemp("sampling")
    flags = [f"--{k}={v}" for k, v in (TINY | {"vocab_size": 320}).items()]
    flags += ["--alibi", *flags_for(tiny_data), "--global_batch_size=4"]
    flags += ["--max_steps=2", "--warmup_steps=1", "--save_interval=1", "--run_dir=run", "--eval_tokens=100"]
    done = launch([], folder, flags)
    assert done.returncode == 0, done.stderr
    return folder


def sampled(run, *args):
    return launch([], run, ["run", *args], program="generate.py")


def test_program_is_deterministic_and_knows_the_steps(run):
    first = sampled(run, "--prompt=the river", "--max_new_tokens=20")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("--- run/checkpoints/step-2 ---\nthe river") and len(first.stdout) > 45
    assert sampled(run, "--prompt=the river", "--max_new_tokens=20").stdout == first.stdout
    assert sampled(run, "--prompt=the river", "--max_new_tokens=20", "--seed=2").stdout != first.stdout
    untrained = sampled(run, "--step=0", "--max_new_tokens=20")
    assert untrained.returncode == 0 and "before training" in untrained.stdout


def test_program_answers_mistakes_in_one_line(run):
    for args, words in (
        (["--step=9"], "no checkpoint of step 9"),
        (["--top_p=0"], "top_p is in (0, 1]"),
    ):
        wrong = sampled(run, *args)
        assert wrong.returncode == 2 and words in wrong.stderr and len(wrong.stderr.splitlines()) == 1
    nowhere = launch([], run, ["nothing"], program="generate.py")
    assert nowhere.returncode == 2 and "no checkpoint in 'nothing'" in nowhere.stderr

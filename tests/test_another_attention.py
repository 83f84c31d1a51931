"""An attention that a fork adds: trained, saved, resumed, decoded; refused where it is unknown."""

import contextlib
import json
import math
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
import torch
from conftest import flags_for
from launches import SIZE, train_here

import attention
import checkpoint
from config import MPTConfig, TrainConfig, load
from lifecycle import resume
from model import MPT, init_weights
from program import UserError
from weights import hf
from weights.load import check_same_model, load_for_sampling, load_model

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 5  # keys that a query sees
NAMES = Literal["auto", "reference", "blocks", "sdpa", "flex", "triton", "test_window"]
FLAGS = [*SIZE, "--alibi", "--device=cpu", "--precision=fp32"]
FLAGS += ["--global_batch_size=4", "--microbatch_size=2", "--warmup_steps=1", "--max_steps=2"]
FLAGS += ["--eval_tokens=100", "--eval_interval=0"]
CPU = torch.device("cpu")


def window_attention(q, k, v, slopes, causal, scale, dropout_p, sequence_ids=None):
    """What a fork would add: the reference, but a query sees only the last WINDOW keys."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    bias = attention.attention_bias(n_queries, n_keys, slopes, causal, q.device, sequence_ids)
    i = torch.arange(n_keys - n_queries, n_keys)[:, None]
    j = torch.arange(n_keys)
    bias = bias.masked_fill(i - j >= WINDOW, -math.inf)
    scores = (q * scale) @ k.transpose(-2, -1) + bias
    return torch.softmax(scores, dim=-1) @ v


def windowed(world=None):
    """The two edits that a fork makes: a name in config.py, an entry in attention.py."""
    edits = contextlib.ExitStack()
    edits.enter_context(mock.patch.dict(MPTConfig.__annotations__, attn_impl=NAMES))
    edits.enter_context(mock.patch.dict(attention.VARIANTS, test_window=window_attention))
    return edits


@pytest.fixture
def edited():
    """This process runs the fork's code."""
    with windowed():
        yield


@pytest.fixture(scope="module")
def run(ranks, tiny_data, tmp_path_factory):
    """A run of two ranks with the window: its flags, its folder."""
    folder = tmp_path_factory.mktemp("window") / "run"
    flags = [*FLAGS, f"--run_dir={folder}", *flags_for(tiny_data)]
    answers = ranks(2)(train_here, [*flags, "--attn_impl=test_window"], windowed)
    status, message, printed = answers[0]
    assert status == 0, message
    assert "test_window attention" in printed
    return flags, folder


@pytest.mark.parametrize("step", [None, 0])
@torch.inference_mode()
def test_sampling_uses_it(edited, run, step):
    model, _, _ = load_for_sampling(str(run[1]), step, CPU)
    ids = torch.randint(257, (2, 20), generator=torch.Generator().manual_seed(0))
    windowed = model(ids)
    model.cfg.attn_impl = "reference"
    assert (model(ids) - windowed).abs().max() > 1e-2


def test_resuming_without_the_flag_is_refused(ranks, run):
    """With the flag, the run resumes."""
    flags, folder = run
    three_steps = [*flags, "--max_steps=3"]
    status, message, _ = ranks(2)(train_here, three_steps, windowed)[0]
    assert status == 2 and "another model: attn_impl test_window (here auto)" in message

    with_flag = [*three_steps, "--attn_impl=test_window"]
    status, message, _ = ranks(2)(train_here, with_flag, windowed)[0]
    assert status == 0, message
    assert checkpoint.latest(folder).name == "step-3"


def test_weights_of_another_function_are_no_initial_weights(edited, run):
    def settings(impl):
        return load([*FLAGS, f"--attn_impl={impl}"], MPTConfig, TrainConfig)[0]

    check_same_model(run[1], settings("test_window"))
    with pytest.raises(UserError, match=r"attn_impl test_window \(here auto\)"):
        check_same_model(run[1], settings("reference"))


def test_export_refuses_it(edited, run, tmp_path):
    with pytest.raises(UserError, match="^attn_impl=test_window does not compute MPT's attention"):
        hf.export(str(run[1]), tmp_path / "theirs")
    assert not list(tmp_path.iterdir())


def test_code_that_lacks_it_refuses_its_checkpoints(run, tmp_path):
    """As for a user who has the run folder but not the fork's code."""
    for use in (
        lambda: load_model(checkpoint.latest(run[1]), CPU),
        lambda: load_for_sampling(str(run[1]), 0, CPU),
        lambda: hf.export(str(run[1]), tmp_path / "theirs"),
    ):
        with pytest.raises(UserError, match=r"^attn_impl in .* is 'test_window', expected one of"):
            use()


def test_a_name_without_an_entry_in_variants_is_refused():
    """Where it is used, and before: in export and in the choice of an implementation."""
    message = r"attn_impl=test_window is neither in IMPLEMENTATIONS nor in VARIANTS"
    with mock.patch.dict(MPTConfig.__annotations__, attn_impl=NAMES):
        (cfg,) = load(["--attn_impl=test_window"], MPTConfig)
        small = MPT(MPTConfig(d_model=32, n_heads=4, n_layers=1, attn_impl="test_window"))
        with pytest.raises(UserError, match=message):
            small(torch.zeros(1, 3).long())
        with pytest.raises(UserError, match=message):
            hf.config_to(cfg)
        with pytest.raises(UserError, match=message):
            attention.choose(cfg.attn_impl, torch.device("cpu"), torch.float32, 8, False)


def test_the_standard_ones_stay_exchangeable():
    meta = {**vars(MPTConfig()), **vars(TrainConfig()), "data_fingerprint": "f00"}
    names = ("auto", *attention.IMPLEMENTATIONS)
    for saved in names:
        for resumed in names:
            cfg = MPTConfig(attn_impl=resumed)
            saved_meta = meta | {"attn_impl": saved}
            resume.check_same(Path("x"), saved_meta, cfg, TrainConfig(), "f00")
            assert "attn_impl" not in json.dumps(hf.config_to(cfg))


# --- What every entry of the tables must do

ON_ANY_DEVICE = [name for name in attention.IMPLEMENTATIONS if name not in ("flex", "triton")]


@pytest.mark.parametrize("name", ON_ANY_DEVICE)
def test_every_implementation_computes_one_function(name):
    """A window in the wrong table would fail here. flex and triton have their own tests."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 40, 16) for heads in (4, 2, 2))
    slopes = attention.alibi_slopes(4)
    found = attention.attention(q, k, v, impl=name, alibi_slopes=slopes)
    reference = attention.attention(q, k, v, impl="reference", alibi_slopes=slopes)
    torch.testing.assert_close(found, reference)


@pytest.mark.parametrize("kv_n_heads", [4, 2])
@pytest.mark.parametrize("name", ["test_window", *attention.VARIANTS])
@torch.inference_mode()
def test_every_variant_decodes_as_it_trains_and_keeps_documents_apart(edited, name, kv_n_heads):
    """Row 0 of a cache has two documents, row 1 padding and then the second document."""
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "max_seq_len": 24}
    model = MPT(MPTConfig(**sizes, alibi=True, kv_n_heads=kv_n_heads, attn_impl=name)).eval()
    init_weights(model, seed=0)
    first, second = torch.randint(64, (2, 1, 12), generator=torch.Generator().manual_seed(0))
    packed = torch.cat([first, second], 1)
    rows = torch.cat([packed, torch.cat([first * 0, second], 1)])
    cache = model.new_cache(2, 24, torch.float32, pad=torch.tensor([0, 12]))
    both = model(packed)[0]  # (24, V)
    alone = model(second)[0]  # (12, V)
    for piece in rows.split([15] + [1] * 9, dim=1):
        logits = model(piece, cache=cache)[:, -1]
        last = cache.length - 1
        torch.testing.assert_close(logits[0], both[last], atol=1e-5, rtol=0)
        torch.testing.assert_close(logits[1], alone[last - 12], atol=1e-5, rtol=0)

    documents = torch.tensor([[0] * 12 + [1] * 12])
    hidden = model.transformer(packed, sequence_ids=documents)
    torch.testing.assert_close(hidden[:, 12:], model.transformer(second), atol=1e-5, rtol=0)

"""An attention that a forker adds stays what it is: trained, saved, resumed, decoded, and refused by other formats."""

import contextlib
import json
import math
import shutil
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
import torch
from conftest import flags_for
from test_stopping import SIZE, train_here

import attention
import checkpoint
from config import MPTConfig, TrainConfig, UserError, load
from lifecycle import resume
from model import MPT, KVCache, init_weights
from serving.decoder import Decoder
from weights import hf
from weights.load import check_same_model, load_for_sampling, load_model

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 5  # keys that a query sees
NAMES = Literal["auto", "reference", "blocks", "sdpa", "flex", "triton", "window"]
FLAGS = [
    *SIZE,
    "--alibi",
    "--device=cpu",
    "--precision=fp32",
    "--global_batch_size=4",
    "--microbatch_size=2",
]
FLAGS += ["--warmup_steps=1", "--max_steps=2", "--eval_tokens=100", "--eval_interval=0"]
CPU = torch.device("cpu")


def window_attention(q, k, v, slopes, causal, scale, dropout_p, ids=None):
    """What a forker would write: the reference, in which a query sees WINDOW keys only."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    bias = attention.attention_bias(n_queries, n_keys, slopes, causal, q.device, ids)
    i, j = torch.arange(n_keys - n_queries, n_keys)[:, None], torch.arange(n_keys)
    scores = (q * scale) @ k.transpose(-2, -1) + bias.masked_fill(i - j >= WINDOW, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def windowed(world=None):
    """The two edits that it takes: a name in config.py, an entry in attention.py."""
    edits = contextlib.ExitStack()
    edits.enter_context(mock.patch.dict(MPTConfig.__annotations__, attn_impl=NAMES))
    edits.enter_context(mock.patch.dict(attention.VARIANTS, window=window_attention))
    return edits


@pytest.fixture
def edited():
    with windowed():
        yield


@pytest.fixture(scope="module")
def run(ranks, tiny_data, tmp_path_factory):
    """A run of two ranks with a window: its flags, its folder, what it printed."""
    folder = tmp_path_factory.mktemp("window") / "run"
    flags = [*FLAGS, f"--run_dir={folder}", *flags_for(tiny_data)]
    status, message, printed = ranks(2)(train_here, [*flags, "--attn_impl=window"], windowed)[0]
    assert status == 0, message
    return flags, folder, printed


def test_the_opening_names_it(run):
    assert "2 layers x 32, window attention" in run[2]


@pytest.mark.parametrize("step", [None, 0])
def test_sampling_uses_it(edited, run, step):
    """On a cache, many queries or one, logits are those of the forward that was trained, and not the standard ones."""
    mpt, _, _ = load_for_sampling(str(run[1]), step, CPU)
    assert mpt.cfg.attn_impl == "window"
    ids = torch.randint(257, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = mpt(ids)
        mpt.cfg.attn_impl = "reference"
        assert (mpt(ids) - whole).abs().max() > 1e-2
        mpt.cfg.attn_impl = "window"
        decode, cache = Decoder(mpt, 260), KVCache.empty(mpt.cfg, 2, 20, "cpu", torch.float32)
        for begin, end in [(0, 7), (7, 8), (8, 13), *((i, i + 1) for i in range(13, 20))]:
            logits = decode(ids[:, begin:end], cache)
            torch.testing.assert_close(logits, whole[:, end - 1], atol=1e-5, rtol=0)


def test_a_loaded_checkpoint_keeps_it(edited, run):
    assert load_model(checkpoint.latest(run[1]), CPU).cfg.attn_impl == "window"


def test_resuming_without_the_flag_is_refused(ranks, run, tmp_path):
    """And with it the run goes on."""
    flags, folder, _ = run
    copy = shutil.copytree(
        folder, tmp_path / "copy"
    )  # the lease of a launch that fails here is never released
    status, message, _ = ranks(2)(
        train_here, [*flags, f"--run_dir={copy}", "--max_steps=3"], windowed
    )[0]
    assert (
        status == 2
        and "is of another model: attn_impl window (here auto). Set them alike" in message
    )
    status, message, _ = ranks(2)(
        train_here, [*flags, "--max_steps=3", "--attn_impl=window"], windowed
    )[0]
    assert status == 0 and checkpoint.latest(folder).name == "step-3", message


def test_weights_of_another_function_are_no_beginning(edited, run):
    def settings(impl):
        return load([*FLAGS, f"--attn_impl={impl}"], MPTConfig, TrainConfig)[0]

    check_same_model(run[1], settings("window"))
    with pytest.raises(UserError, match=r"is of another model: attn_impl window \(here auto\)"):
        check_same_model(run[1], settings("reference"))


def test_export_refuses_it(edited, run, tmp_path):
    with pytest.raises(
        UserError, match="^attn_impl=window is another function than MPT's attention"
    ) as caught:
        hf.export(str(run[1]), tmp_path / "theirs")
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_code_that_lacks_it_refuses_its_checkpoints(run, tmp_path):
    """As whoever gets the folder and not the fork."""
    for use in (
        lambda: load_model(checkpoint.latest(run[1]), CPU),
        lambda: load_for_sampling(str(run[1]), 0, CPU),
        lambda: hf.export(str(run[1]), tmp_path / "theirs"),
    ):
        with pytest.raises(
            UserError, match=r"^attn_impl in .* is 'window', expected one of: auto, reference"
        ):
            use()


def test_half_of_the_edits_is_an_error_that_names_the_other_half():
    with mock.patch.dict(MPTConfig.__annotations__, attn_impl=NAMES):
        (cfg,) = load(["--attn_impl=window"], MPTConfig)
        for use in (
            lambda: MPT(MPTConfig(d_model=32, n_heads=4, n_layers=1, attn_impl="window"))(
                torch.zeros(1, 3).long()
            ),
            lambda: hf.config_to(cfg),
            lambda: attention.choose(cfg.attn_impl, "cpu", torch.float32, 8, False),
        ):
            with pytest.raises(
                UserError, match=r"attn_impl=window is neither in IMPLEMENTATIONS nor in VARIANTS"
            ):
                use()
    expected = pytest.raises(
        UserError, match="attn_impl in the command line is 'window', expected one of: auto"
    )
    with mock.patch.dict(attention.VARIANTS, window=window_attention), expected:
        load(["--attn_impl=window"], MPTConfig)


def test_the_standard_ones_stay_exchangeable():
    meta = {**vars(MPTConfig()), **vars(TrainConfig()), "data_fingerprint": "f00"}
    for saved in ("auto", *attention.IMPLEMENTATIONS):
        for here in ("auto", *attention.IMPLEMENTATIONS):
            cfg = MPTConfig(attn_impl=here)
            resume.check_same(Path("x"), meta | {"attn_impl": saved}, cfg, TrainConfig(), "f00")
            assert "attn_impl" not in json.dumps(hf.config_to(cfg))


# ---------------------------------------------------------------------------------------------------------------
# What every entry of the tables must do


@pytest.mark.parametrize(
    "name", [name for name in attention.IMPLEMENTATIONS if name not in ("flex", "triton")]
)
def test_every_implementation_computes_one_function(name):
    """So that a window in the wrong table is noticed. flex and triton have their own tests."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 40, 16) for heads in (4, 2, 2))
    slopes = attention.alibi_slopes(4)
    found = attention.attention(q, k, v, impl=name, alibi_slopes=slopes)
    torch.testing.assert_close(
        found, attention.attention(q, k, v, impl="reference", alibi_slopes=slopes)
    )


@pytest.mark.parametrize("kv_n_heads", [4, 2])
@pytest.mark.parametrize("name", ["window", *attention.VARIANTS])
def test_every_variant_decodes_as_it_trains_and_keeps_documents_apart(edited, name, kv_n_heads):
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "max_seq_len": 24}
    mpt = MPT(MPTConfig(**sizes, alibi=True, kv_n_heads=kv_n_heads, attn_impl=name)).eval()
    init_weights(mpt, seed=0)
    first, second = torch.randint(64, (2, 1, 12), generator=torch.Generator().manual_seed(0))
    pad = torch.tensor([0, 12])
    rows = torch.cat([torch.cat([first, second], 1), torch.cat([first * 0, second], 1)])
    cache = KVCache.empty(mpt.cfg, 2, 24, "cpu", torch.float32, pad=pad)
    with torch.inference_mode():
        whole, alone = mpt(rows[:1]), mpt(second)
        for begin, end in [(0, 15), *((i, i + 1) for i in range(15, 24))]:
            logits = mpt(rows[:, begin:end], cache=cache)[:, -1]
            torch.testing.assert_close(
                logits[0], whole[0, end - 1], atol=1e-5, rtol=0
            )  # on a cache
            torch.testing.assert_close(
                logits[1], alone[0, end - 13], atol=1e-5, rtol=0
            )  # after padding
        documents = torch.tensor([[0] * 12 + [1] * 12])
        packed = mpt.transformer(rows[:1], sequence_ids=documents)[:, 12:]
        torch.testing.assert_close(packed, mpt.transformer(second), atol=1e-5, rtol=0)

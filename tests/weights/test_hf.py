"""weights/hf.py: import and export bit for bit, loading onto ranks, errors of one line."""

import datetime
import json
import os
import random
import resource
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TORCHRUN, launch, refusal

import checkpoint
import parallel
from config import MPTConfig, TrainConfig
from model import MPT, init_weights
from program import UserError
from storage import checkpoint_files, files
from weights import hf, hf_config, load, tensor_files

CPU = torch.device("cpu")
SMALL = MPTConfig(d_model=48, n_heads=6, n_layers=2, max_seq_len=40, vocab_size=97)
LIKE_TRANSFORMERS = dict(alibi=True, no_bias=True, learned_pos_emb=False)
VARIANTS = {
    "learned_positions": {},
    "biases": dict(alibi=True),
    "qk_ln": dict(qk_ln=True),
    "grouped": dict(kv_n_heads=2, no_bias=True),
    "multi_query": dict(kv_n_heads=1),
    "rope": dict(rope=True, rope_theta=5e3),
    "untied": dict(tie_word_embeddings=False, logit_scale="inv_sqrt_d_model"),
    "storywriter": dict(alibi=True, alibi_bias_max=16, clip_qkv=0.3, no_bias=True),
    "wide": dict(expansion_ratio=2.5, softmax_scale=0.2, logit_scale=0.5, norm_type="layernorm"),
    "packed": dict(attn_uses_sequence_id=True, emb_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1),
    "gated": dict(ffn_type="mptglu", ffn_act_fn="silu", norm_type="rmsnorm", rope=True),
    "capped": dict(
        qk_gn=True,
        sliding_window_size=5,
        attn_logit_softcapping=0.7,
        final_logit_softcapping=0.4,
        embedding_fraction=0.5,
        ffn_act_fn="relu",
    ),
}


def build(cfg, seed=0, dtype=torch.float32):
    """A model in which no parameter is 0 or 1."""
    model = MPT(cfg)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return model.to(dtype).eval()


def empty(cfg, dtype=torch.float32):
    """A model full of nan, so that a test sees what was not filled."""
    model = MPT(cfg).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    return model.eval()


def tokens(cfg, length=None):
    shape = (2, length or cfg.max_seq_len)
    return torch.randint(0, cfg.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def relative_error(found, exact):
    return ((found - exact).abs().max() / exact.abs().max()).item()


@pytest.fixture
def theirs(tmp_path):
    """A Hugging Face folder with its weights in many files."""
    model = build(replace(SMALL, vocab_size=300, **LIKE_TRANSFORMERS))
    hf.export(model, tmp_path / "theirs", max_bytes=30_000)
    return tmp_path / "theirs"


# --- transformers


@pytest.mark.parametrize(
    "heads, width, layers, shard, safe, more",
    [
        (7, 56, 3, "5GB", True, {"clip_qkv": 0.4}),
        (12, 96, 2, "50KB", False, {"softmax_scale": 0.3}),
        (1, 32, 1, "1KB", True, {}),
    ],
)
def test_transformers_to_here_and_back(heads, width, layers, shard, safe, more, tmp_path):
    """Its softmax is fp32 even in a float64 model, hence 2e-6.

    transformers no longer writes .bin files, so torch.save does here.
    """
    transformers = pytest.importorskip("transformers")
    sizes = dict(d_model=width, n_heads=heads, n_layers=layers, max_seq_len=40, vocab_size=101)
    torch.manual_seed(heads)
    model = transformers.MptForCausalLM(transformers.MptConfig(**sizes, attn_config=more)).eval()
    model.save_pretrained(tmp_path / "a", max_shard_size=shard)
    if not safe:
        as_bin(tmp_path / "a")
    cfg = hf.settings_of(tmp_path / "a")
    assert cfg == MPTConfig(**sizes, alibi=True, no_bias=True, **more)

    ours = empty(cfg, torch.double)
    hf.load_into(ours, tmp_path / "a")
    ids = tokens(cfg)
    with torch.no_grad():
        assert relative_error(ours(ids), model.double()(ids).logits) < 2e-6

    ours = empty(cfg)
    hf.load_into(ours, tmp_path / "a")
    hf.export(ours, tmp_path / "b", max_bytes=50_000)
    again, report = transformers.MptForCausalLM.from_pretrained(
        tmp_path / "b", output_loading_info=True
    )
    assert not any(report.values()), report
    assert same_weights(again, model.float())
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def as_bin(folder):
    """Turn the safetensors files of a folder into .bin files, as transformers used to write them.

    A tied output layer is in them under both names.
    """
    load_file = pytest.importorskip("safetensors.torch").load_file
    for file in folder.glob("*.safetensors"):
        state = load_file(file)
        if "transformer.wte.weight" in state:
            state["lm_head.weight"] = state["transformer.wte.weight"]
        name = file.name.replace("model", "pytorch_model", 1).replace("safetensors", "bin")
        torch.save(state, folder / name)
        file.unlink()
    for index in folder.glob("*.index.json"):
        text = index.read_text().replace("model-", "pytorch_model-").replace("safetensors", "bin")
        (folder / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()


SETTINGS = {
    "alibi": False,
    "alibi_bias_max": 16,
    "no_bias": False,
    "qk_ln": True,
    "logit_scale": 0.5,
    "kv_n_heads": 2,
    "expansion_ratio": 2,
    "clip_qkv": 0.2,
    "softmax_scale": 0.4,
    "tie_word_embeddings": False,
    "rope": True,
    "learned_pos_emb": True,
    "norm_type": "low_precision_rmsnorm",
    "attn_pdrop": 0.1,
    "ffn_type": "mptglu",
    "ffn_act_fn": "silu",
    "qk_gn": True,
    "sliding_window_size": 3,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.5,
}


@pytest.mark.parametrize("name, value", [*SETTINGS.items(), ("norm_type", "layernorm")])
def test_what_transformers_does_not_know_is_warned_of(name, value, tmp_path, capsys):
    """A warning if and only if transformers refuses the folder or computes other logits."""
    transformers = pytest.importorskip("transformers")
    more = LIKE_TRANSFORMERS | {name: value}
    if name in ("rope", "learned_pos_emb"):
        more["alibi"] = False
    model = build(replace(SMALL, **more))
    hf.export(model, tmp_path / "out")
    warning = capsys.readouterr().err
    ids = tokens(SMALL)
    try:
        theirs = transformers.MptForCausalLM.from_pretrained(tmp_path / "out").eval()
        with torch.no_grad():
            works_there = relative_error(theirs(ids).logits, model(ids)) < 1e-5
    except Exception as error:
        is_refusal = isinstance(error, ValueError | RuntimeError | TypeError)
        assert is_refusal or "Validation" in type(error).__name__
        works_there = False
    assert works_there == (not warning)
    assert works_there == (f"{name}={value}" not in warning)

    # A folder that transformers wrote: which of these settings did it follow?
    settings = json.loads((tmp_path / "out/config.json").read_text())
    (tmp_path / "out/config.json").write_text(json.dumps(settings | {"transformers_version": "5"}))
    hf.settings_of(tmp_path / "out")
    words = f"transformers wrote {tmp_path}/out/config.json, and its MptForCausalLM ignores "
    assert works_there == (words not in capsys.readouterr().err)


# --- our own models


@pytest.mark.parametrize("more", VARIANTS.values(), ids=VARIANTS)
def test_our_models_come_back_bit_equal(more, tmp_path):
    model = build(replace(SMALL, **more))
    hf.export(model, tmp_path / "out", max_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    assert hf.settings_of(tmp_path / "out") == model.cfg
    again = empty(model.cfg)
    hf.load_into(again, tmp_path / "out")
    assert same_weights(again, model)
    assert torch.equal(again(tokens(SMALL)), model(tokens(SMALL)))


@pytest.mark.parametrize(
    "stored, here", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float64")]
)
def test_numbers_take_the_dtype_of_the_parameters(stored, here, tmp_path, monkeypatch):
    # Several chunks a tensor, the last one shorter.
    monkeypatch.setattr(tensor_files, "CHUNK", 1000)
    stored, here = getattr(torch, stored), getattr(torch, here)
    model = build(SMALL, dtype=stored)
    found = empty(SMALL, here)
    hf.export(model, tmp_path / "out")
    hf.load_into(found, tmp_path / "out")
    assert same_weights(found, model.to(here))


def save_composer(path, model, more=None, **state):
    """A checkpoint as Composer's trainer saves it.

    Names have a prefix, and there are an optimizer, times and random states.
    """
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    times = {"Timestamp": {"epoch": 1, "batch": 7, "total_wct": datetime.timedelta(seconds=9)}}
    optimizers = {"DecoupledAdamW": {"state": {}, "param_groups": [{"lr": 1e-3, "params": [0]}]}}
    rng = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.random.get_rng_state(),
    }
    state = {"model": weights, "timestamp": times, "optimizers": optimizers, **state}
    torch.save({"state": state, "rng": [rng], **(more or {})}, path)


def test_composer_checkpoints(tmp_path):
    cfg = replace(SMALL, tie_word_embeddings=False, **VARIANTS["gated"])
    model, path = build(cfg), tmp_path / "ep0-ba7-rank0.pt"
    content = {
        "file_extension": ".json",
        "content": hf_config.config_to(cfg),
        "class": "transformers_modules.MPTConfig",
    }
    save_composer(path, model, integrations={"huggingface": {"model": {"config": content}}})
    assert hf.settings_of(path) == cfg
    found = empty(cfg)
    load.init_from(found, path)
    assert same_weights(found, model)

    save_composer(path, model)
    assert "put its config.json beside it" in refusal(hf.settings_of, path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config.config_to(cfg)))
    assert hf.settings_of(path) == cfg

    save_composer(path, model, {"metrics": launch})  # a function, which no loader allows
    assert "conftest.launch" in refusal(hf.load_into, found, path)


# --- onto ranks


def fill_on(world, folder, cfg, sharding, dtype):
    """Fill a sharded model.

    Returns its logits, and the set of answers to: does this rank hold the whole parameter?
    """
    train = TrainConfig(**sharding)
    with torch.device("meta"):
        model = MPT(cfg).to(dtype)
    model = parallel.parallelize(model, parallel.make_mesh(world, train), train, "fp32")
    parallel.materialize(model, world.device, None)
    load.init_from(model, folder)
    whole = {p.to_local().shape == p.shape for p in model.parameters()}
    with torch.no_grad():
        return model.eval()(tokens(cfg)).numpy(), whole


@pytest.mark.parametrize(
    "n_ranks, sharding",
    [
        (2, {"sharding": "FULL_SHARD"}),
        (2, {"sharding": "DDP"}),
        (4, {"sharding": "HYBRID_SHARD", "shard_size": 2}),
    ],
)
def test_straight_onto_ranks(ranks, n_ranks, sharding, tmp_path):
    """The vocabulary does not divide by 2, so the last rank of a shard group has fewer rows."""
    cfg = MPTConfig(d_model=30, n_heads=5, n_layers=2, max_seq_len=20, vocab_size=101, qk_ln=True)
    model = build(cfg, dtype=torch.double)
    hf.export(model, tmp_path / "out", max_bytes=20_000)
    with torch.no_grad():
        wanted = model(tokens(cfg))
    arguments = str(tmp_path / "out"), cfg, sharding, torch.double
    for logits, whole in ranks(n_ranks)(fill_on, *arguments):
        assert whole == {sharding["sharding"] == "DDP"}
        assert relative_error(torch.from_numpy(logits), wanted) < 1e-12


MEASURE = """
import resource, sys
import torch, parallel, processes
from weights import hf
from config import TrainConfig
from model import MPT

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def main(argv):
    world, cfg = processes.start(), TrainConfig()
    model, _ = parallel.build(hf.settings_of(argv[0]), cfg, world, "fp32", seed=None)
    whole = sum(p.numel() for p in model.parameters())
    part = sum(p.to_local().numel() for p in model.parameters())
    hf.load_into(MPT(hf.settings_of(argv[2])), argv[2])  # the first load allocates more, once
    before = peak()
    for folder in argv[:2]:
        hf.load_into(model, folder)
        line = f"measured {peak() - before} {4 * whole} {4 * part}"
        print(line + chr(10), end="", flush=True)  # in one write: ranks print at the same time

processes.run(main)
"""


@pytest.mark.slow
def test_a_rank_never_holds_the_whole_model(tmp_path):
    """350 MB in one file of each kind, onto two ranks: each grows by its half and little more."""
    sizes = dict(d_model=768, n_heads=12, n_layers=7, vocab_size=50368)
    large = MPT(replace(SMALL, **sizes, **LIKE_TRANSFORMERS))
    hf.export(large, tmp_path / "safe")
    hf.export(MPT(replace(SMALL, **LIKE_TRANSFORMERS)), tmp_path / "tiny")
    (tmp_path / "bin").mkdir()
    shutil.copy(tmp_path / "safe/config.json", tmp_path / "bin")
    torch.save(large.state_dict(), tmp_path / "bin/pytorch_model.bin")
    (tmp_path / "measure.py").write_text(MEASURE)
    folders = ["safe", "bin", "tiny"]
    done = launch([*TORCHRUN, "2"], tmp_path, folders, program=tmp_path / "measure.py")
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("measured")]
    assert len(lines) == 2 * 2, done.stderr
    for grown, whole, part in (map(int, line) for line in lines):
        assert whole > 3.4e8 and 0.9 * part < grown < part + 5e7 < 0.7 * whole


# --- import to a run folder, and export from one


def test_import_sample_and_export(tmp_path, capsys):
    cfg = replace(SMALL, vocab_size=300, alibi=True, max_seq_len=64)
    model = build(cfg, dtype=torch.bfloat16)
    hf.export(model, tmp_path / "theirs", max_bytes=40_000)
    hf.main(["import", str(tmp_path / "theirs"), str(tmp_path / "run"), "--tokenizer=bytes"])
    assert "Tokenizer: bytes. If the model" in capsys.readouterr().out

    found, tokenizer, name = load.load_for_sampling(str(tmp_path / "run"), None, CPU)
    assert tokenizer.name == "bytes" and name.endswith("step-0") and found.cfg == cfg
    assert same_weights(found, model.float())
    step = tmp_path / "run/checkpoints/step-0"
    checksums = checkpoint_files.read_checksums(step)
    assert {"meta.json", ".metadata"} < set(checksums)
    for file, checksum in checksums.items():
        assert checkpoint_files.fault(step / file, *checksum) is None
    weight_bytes = sum(path.stat().st_size for path in step.glob("*.distcp"))
    n_params = sum(p.numel() for p in found.parameters())
    assert weight_bytes < 1.2 * 2 * n_params + 50_000  # it keeps their dtype, bf16

    hf.main(["export", str(tmp_path / "run"), str(tmp_path / "back")])
    assert "written. Tokenizer: bytes\n" in capsys.readouterr().out
    again = empty(hf.settings_of(tmp_path / "back"), torch.bfloat16)
    hf.load_into(again, tmp_path / "back")
    assert same_weights(again, model.bfloat16())
    assert files.read_json(tmp_path / "back/config.json")["torch_dtype"] == "bfloat16"
    hf.import_(tmp_path / "back", tmp_path / "again")  # the tokenizer's name went along
    assert checkpoint.read_meta(tmp_path / "again/checkpoints/step-0")["tokenizer"] == "bytes"


def test_the_tokenizer_must_fit(tmp_path):
    hf.export(build(SMALL), tmp_path / "small")
    message = refusal(hf.import_, tmp_path / "small", tmp_path / "run", "bytes")
    assert "257 ids" in message and "vocab_size is 97" in message
    assert not (tmp_path / "run").exists()


# --- what is broken


def rewrite(folder, change):
    """Replace the weights of a folder by one file of others, to which `change` was applied."""
    state = MPT(hf.settings_of(folder)).state_dict()
    remove_weights(folder)
    change(state)
    tensor_files.write_safetensors(folder / "model.safetensors", state)


def first(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def remove_weights(folder):
    for path in folder.glob("model*"):
        path.unlink()


def repeat_first_file(folder):
    sorted(folder.glob("*.safetensors"))[1].write_bytes(first(folder).read_bytes())


def remove_tensor(folder, name):
    rewrite(folder, lambda state: state.pop(name))


def put_tensor(folder, name, tensor):
    rewrite(folder, lambda state: state.update({name: tensor}))


def change_head(folder):
    def change(state):
        state["lm_head.weight"] = state["transformer.wte.weight"] + 1

    rewrite(folder, change)


NORM = "transformer.norm_f.weight"
POSITIONS = "transformer.wpe.weight"
BROKEN = {  # the message, and what is done to the folder
    "00001-of-.* is truncated or damaged": lambda f: os.truncate(first(f), 9999),
    r"names \d+ files, but model-00001": lambda f: first(f).unlink(),
    "No such file or directory: .*config.json": lambda f: (f / "config.json").unlink(),
    "no weights in .*expected model.safetensors": remove_weights,
    rf"lacks 1 tensors of this model, .*'{NORM}'": lambda f: remove_tensor(f, NORM),
    rf"holds 1 tensors that this model lacks, .*'{POSITIONS}'": lambda f: put_tensor(
        f, POSITIONS, torch.zeros(3, 48)
    ),
    r"norm_f.weight is \(7,\) in .*, but \(48,\)": lambda f: put_tensor(f, NORM, torch.zeros(7)),
    "lm_head.weight in .* differs from the embedding": change_head,
    "twice, the second time in": repeat_first_file,
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_is_broken_is_named_in_one_line(message, theirs, tmp_path):
    """Beside what test_fuzz.py does to these files."""
    BROKEN[message](theirs)
    with pytest.raises((UserError, OSError), match=message) as error:
        hf.import_(theirs, tmp_path / "run", "bytes")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_broken_bin_files(tmp_path):
    model, path = build(SMALL), tmp_path / "pytorch_model.bin"
    (tmp_path / "config.json").write_text(json.dumps(hf_config.config_to(SMALL)))
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    assert "torch before 1.6" in refusal(hf.load_into, model, tmp_path)
    sparse = {"transformer.wte.weight": torch.zeros(97, 48).to_sparse()}
    contents = {
        "wte.weight in": model.state_dict() | sparse,
        "model.MPT": model,
        "no dictionary of weights": [1, 2],
    }
    for message, content in contents.items():
        torch.save(content, path)
        assert message in refusal(hf.load_into, model, tmp_path)


def test_tensors_of_a_bin_file_that_are_not_stored_as_they_are(tmp_path):
    """Transposed, with the sign turned, or within a larger one."""
    model, found = build(SMALL), empty(SMALL)
    state = model.state_dict()
    larger = torch.zeros(60, 50)
    larger[7 : 7 + 48, 1 : 1 + 48] = state["transformer.blocks.0.attn.out_proj.weight"]
    state["transformer.blocks.0.attn.out_proj.weight"] = larger[7 : 7 + 48, 1 : 1 + 48]
    state["transformer.wte.weight"] = state["transformer.wte.weight"].T.contiguous().T
    state["transformer.norm_f.weight"] = (-state["transformer.norm_f.weight"])._neg_view()
    torch.save(state, tmp_path / "pytorch_model.bin")
    hf.load_into(found, tmp_path)
    assert same_weights(found, model)


def test_nothing_is_half_written(tmp_path, theirs):
    """The disk is full (here: a limit on file sizes), or the target exists: import and export."""
    hf.export(build(replace(SMALL, vocab_size=300)), tmp_path / "fits")
    before = sorted(path.name for path in tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        full = [
            refusal(hf.export, build(SMALL), tmp_path / "out"),
            refusal(hf.import_, tmp_path / "fits", tmp_path / "run", "bytes"),
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all("could not write" in text and "File too large" in text for text in full)
    there = "fits is there already"
    assert there in refusal(hf.export, build(SMALL), tmp_path / "fits")
    assert there in refusal(hf.import_, tmp_path / "fits", tmp_path / "fits", "bytes")
    in_the_way = tmp_path / "fits/config.json/out"
    assert "could not write" in refusal(hf.export, build(SMALL), in_the_way)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    (tmp_path / "empty").mkdir()
    hf.export(build(SMALL), tmp_path / "empty")
    assert hf.settings_of(tmp_path / "empty") == SMALL


def routed(cfg):
    """A model of a forker, whose feed-forwards have one more weight."""
    model = build(cfg)
    for block in model.transformer.blocks:
        block.ffn.router = torch.nn.Linear(48, 8, bias=False)
    return model


def test_weights_that_the_format_lacks_are_not_exported(tmp_path):
    assert "ffn.router.weight" in refusal(hf.export, routed(SMALL), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_composer_state_of_a_wrong_type_is_one_line(tmp_path):
    path = tmp_path / "ep0.pt"
    for state in (7, [1], "x", None, {}, {"model": 7}, {"model": [1]}, {"model": {1: 2}}):
        torch.save({"state": state}, path)
        assert "does not hold its model's settings" in refusal(hf.settings_of, path)
        assert "ep0.pt" in refusal(tensor_files.locate, path)
        held = {"integrations": {"huggingface": {"model": {"config": {"content": state}}}}}
        torch.save({"state": held}, path)
        assert "ep0.pt" in refusal(hf.settings_of, path)

"""weights/hf.py: to and from transformers' files bit for bit, refusals by name, one line for what is broken."""

import datetime
import json
import random
import resource
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TORCHRUN, launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import checkpoint
import parallel
from config import MPTConfig, TrainConfig, UserError
from model import MPT, init_weights
from storage import checkpoint_files, files
from text import tokenizer as tokenizers
from weights import hf, hf_config, load, tensor_files

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
    """A model full of nan: what is not filled shows."""
    model = MPT(cfg).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    return model.eval()


def tokens(cfg, length=None):
    return torch.randint(
        0,
        cfg.vocab_size,
        (2, length or cfg.max_seq_len),
        generator=torch.Generator().manual_seed(0),
    )


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def relative_error(found, exact):
    return ((found - exact).abs().max() / exact.abs().max()).item()


@pytest.fixture
def theirs(tmp_path):
    """A folder in their layout, in many files."""
    hf.export(
        build(replace(SMALL, vocab_size=300, **LIKE_TRANSFORMERS)),
        tmp_path / "theirs",
        max_bytes=30_000,
    )
    return tmp_path / "theirs"


# --- transformers


@pytest.mark.parametrize(
    "heads, width, layers, shard, safe, more",
    [
        (4, 64, 2, "20KB", True, {}),
        (7, 56, 3, "5GB", True, {"clip_qkv": 0.4}),
        (12, 96, 2, "50KB", False, {"softmax_scale": 0.3}),
        (3, 48, 1, "5GB", False, {"clip_qkv": 0.2}),
        (1, 32, 1, "1KB", True, {}),
    ],
)
def test_transformers_to_here_and_back(heads, width, layers, shard, safe, more, tmp_path):
    """Its softmax is fp32 even in a float64 model, hence 2e-6. It no longer writes .bin files: torch.save does here."""
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
    """The safetensors files of a folder as .bin files, the tied head in them twice, as transformers used to write."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    for file in folder.glob("*.safetensors"):
        state = load_file(file)
        if "transformer.wte.weight" in state:
            state["lm_head.weight"] = state["transformer.wte.weight"]
        torch.save(
            state,
            folder / file.name.replace("model", "pytorch_model", 1).replace("safetensors", "bin"),
        )
        file.unlink()
    for index in folder.glob("*.index.json"):
        text = index.read_text().replace("model-", "pytorch_model-").replace("safetensors", "bin")
        (folder / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()


SETTINGS = {
    **{
        "alibi": False,
        "alibi_bias_max": 16,
        "no_bias": False,
        "qk_ln": True,
        "logit_scale": 0.5,
        "kv_n_heads": 2,
    },
    **{
        "expansion_ratio": 2,
        "clip_qkv": 0.2,
        "softmax_scale": 0.4,
        "tie_word_embeddings": False,
        "rope": True,
    },
    **{"learned_pos_emb": True, "norm_type": "layernorm", "attn_pdrop": 0.1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_transformers_does_not_know_is_warned_of(name, tmp_path, capsys):
    """A warning if and only if it refuses the folder or computes other logits."""
    transformers = pytest.importorskip("transformers")
    more = (
        LIKE_TRANSFORMERS
        | {name: SETTINGS[name]}
        | ({"alibi": False} if name in ("rope", "learned_pos_emb") else {})
    )
    ours = build(replace(SMALL, **more))
    hf.export(ours, tmp_path / "out")
    warned = capsys.readouterr().err
    ids = tokens(SMALL)
    try:
        theirs = transformers.MptForCausalLM.from_pretrained(tmp_path / "out").eval()
        with torch.no_grad():
            same = relative_error(theirs(ids).logits, ours(ids)) < 1e-5
    except Exception as error:
        assert (
            isinstance(error, ValueError | RuntimeError | TypeError)
            or "Validation" in type(error).__name__
        )
        same = False
    assert same == (f"{name}={SETTINGS[name]}" not in warned) == (not warned)


def test_dropouts_and_packing_are_warned_of():
    lost = hf_config.lost_in_transformers(
        replace(SMALL, **LIKE_TRANSFORMERS, resid_pdrop=0.1, attn_uses_sequence_id=True)
    )
    assert lost == ["attn_uses_sequence_id=True", "resid_pdrop=0.1"]


def test_their_package_reads_our_safetensors(tmp_path):
    safe_open = pytest.importorskip("safetensors").safe_open
    model = build(SMALL, dtype=torch.bfloat16)
    tensor_files.write_safetensors(tmp_path / "x.safetensors", model.state_dict())
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in model.state_dict().items()
        }


# --- settings

HUB_7B = {  # the layout of LLM Foundry in 2023, as on the hub
    **{
        "architectures": ["MPTForCausalLM"],
        "model_type": "mpt",
        "d_model": 4096,
        "n_heads": 32,
        "n_layers": 32,
    },
    "attn_config": {
        **{
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "clip_qkv": None,
        },
        **{
            "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False,
            "prefix_lm": False,
            "qk_ln": False,
        },
        "softmax_scale": None,
    },
    "auto_map": {
        "AutoConfig": "configuration_mpt.MPTConfig",
        "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
    },
    **{
        "emb_pdrop": 0,
        "embedding_fraction": 1.0,
        "expansion_ratio": 4,
        "init_device": "cpu",
        "learned_pos_emb": True,
    },
    "init_config": {
        "name": "kaiming_normal_",
        "fan_mode": "fan_in",
        "init_nonlinearity": "relu",
        "verbose": 0,
    },
    **{
        "logit_scale": None,
        "max_seq_len": 2048,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
    },
    **{
        "resid_pdrop": 0,
        "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "torch_dtype": "bfloat16",
        "use_cache": False,
    },
    **{"transformers_version": "4.28.1", "verbose": 0, "vocab_size": 50432},
}
LATER = {  # what later versions of LLM Foundry add
    **{
        "fc_type": {"name": "torch"},
        "ffn_config": {"ffn_type": "mptmlp"},
        "tie_word_embeddings": True,
    },
    **{
        "use_pad_tok_in_ffn": True,
        "norm_eps": 1e-5,
        "block_overrides": None,
        "final_logit_softcapping": None,
    },
}
LATER_ATTENTION = {
    **{
        "qk_gn": False,
        "fused_qkv": True,
        "sliding_window_size": -1,
        "attn_logit_softcapping": None,
        "kv_dim": None,
    },
    **{"rope": False, "rope_theta": 10000, "rope_impl": "dail", "flex_attn_mod_list": []},
    "rope_dail_config": {"type": "original", "pos_idx_in_fp32": True, "xpos_scale_base": 512},
    "rope_hf_config": {"type": "no_scaling", "factor": 1.0},
}


def like_hub(top=None, **attention):
    return HUB_7B | (top or {}) | {"attn_config": HUB_7B["attn_config"] | attention}


MPT_7B = MPTConfig(
    d_model=4096, n_heads=32, n_layers=32, vocab_size=50432, alibi=True, no_bias=True
)


@pytest.mark.parametrize(
    "settings, wanted",
    [
        (HUB_7B, MPT_7B),
        (like_hub(LATER, **LATER_ATTENTION), MPT_7B),
        (
            like_hub({"d_model": 7168, "n_heads": 64, "n_layers": 48, "max_seq_len": 8192}),
            replace(MPT_7B, d_model=7168, n_heads=64, n_layers=48, max_seq_len=8192),
        ),
        (
            like_hub({"max_seq_len": 65536}, alibi_bias_max=16, clip_qkv=6),
            replace(MPT_7B, max_seq_len=65536, alibi_bias_max=16, clip_qkv=6),
        ),
        (like_hub(attn_type="multiquery_attention"), replace(MPT_7B, kv_n_heads=1)),
        (
            like_hub(attn_type="grouped_query_attention", kv_n_heads=8),
            replace(MPT_7B, kv_n_heads=8),
        ),
        (
            like_hub(alibi=False, rope=True, rope_theta=5e5),
            replace(MPT_7B, alibi=False, rope=True, rope_theta=5e5),
        ),
        (
            like_hub(
                alibi=False,
                rope=True,
                rope_impl="hf",
                rope_hf_config={"type": "no_scaling", "factor": 1.0},
            ),
            replace(MPT_7B, alibi=False, rope=True),
        ),
        (like_hub({"logit_scale": 0.5}, qk_ln=True), replace(MPT_7B, logit_scale=0.5, qk_ln=True)),
        ({"model_type": "mpt"}, MPTConfig()),  # LLM Foundry's defaults are ours
        (
            {"model_type": "mpt", "architectures": ["MptForCausalLM"]},
            MPTConfig(alibi=True, no_bias=True),
        ),
    ],
)
def test_settings_of_published_models(settings, wanted):
    assert hf_config.config_from(settings) == wanted
    assert hf_config.config_from(json.loads(json.dumps(hf_config.config_to(wanted)))) == wanted


@pytest.mark.parametrize("more", VARIANTS.values(), ids=VARIANTS)
def test_every_setting_comes_back(more):
    cfg = replace(SMALL, **more)
    assert hf_config.config_from(json.loads(json.dumps(hf_config.config_to(cfg)))) == cfg


@pytest.mark.parametrize(
    "settings, named",
    [
        (like_hub(prefix_lm=True), "prefix_lm"),
        (like_hub(qk_gn=True), "qk_gn"),
        (like_hub(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (like_hub(sliding_window_size=256), "sliding_window_size"),
        (like_hub(fused_qkv=False), "fused_qkv"),
        (like_hub(kv_dim=512), "kv_dim"),
        (like_hub(attn_type="sparse"), "attn_type to 'sparse'"),
        (
            like_hub(attn_type="grouped_query_attention"),
            "kv_n_heads must be from 1 to 65,536, not 0",
        ),
        (like_hub(nonsense=3), "nonsense to 3"),
        (like_hub(alibi="yes"), "alibi in config.json is 'yes'"),
        (like_hub(rope=True), "rope and alibi"),
        (
            like_hub(alibi=False, rope=True, rope_dail_config={"type": "xpos"}),
            "rope_dail_config to 'xpos'",
        ),
        (
            like_hub(alibi=False, rope=True, rope_impl="hf", rope_hf_config={"type": "linear"}),
            "config to 'linear'",
        ),
        (like_hub({"final_logit_softcapping": 30.0}), "final_logit_softcapping"),
        (like_hub({"embedding_fraction": 0.5}), "embedding_fraction"),
        (like_hub({"ffn_config": {"ffn_type": "mptglu"}}), "ffn_type to 'mptglu'"),
        (like_hub({"ffn_config": {"ffn_type": "mptmlp", "ffn_hidden_size": 9}}), "ffn_hidden_size"),
        (
            like_hub({"ffn_config": {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}}),
            "ffn_act_fn",
        ),
        (like_hub({"norm_type": "rmsnorm"}), "norm_type"),
        (like_hub({"layer_norm_epsilon": 1e-6}), "layer_norm_epsilon"),
        (like_hub({"fc_type": "te"}), "fc_type"),
        (like_hub({"block_overrides": {"order": []}}), "block_overrides"),
        (like_hub({"n_heads": 33}), "n_heads 33"),
        ({"model_type": "llama", "hidden_size": 8}, "model_type 'llama'"),
        ({}, "model_type None"),
    ],
)
def test_what_we_do_not_have_is_refused_by_name(settings, named):
    with pytest.raises(UserError, match=named) as error:
        hf_config.config_from(settings)
    assert "\n" not in str(error.value)


# --- our own models


@pytest.mark.parametrize("more", VARIANTS.values(), ids=VARIANTS)
def test_our_models_come_back_bit_equal(more, tmp_path):
    model = build(replace(SMALL, **more))
    hf.export(model, tmp_path / "out", max_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict()) and set(
        index["weight_map"].values()
    ) == set(files)
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    again = empty(hf.settings_of(tmp_path / "out"))
    hf.load_into(again, tmp_path / "out")
    assert same_weights(again, model)
    assert torch.equal(again(tokens(SMALL)), model(tokens(SMALL)))


@pytest.mark.parametrize(
    "stored, here", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float64")]
)
def test_numbers_take_the_dtype_of_the_parameters(stored, here, tmp_path, monkeypatch):
    monkeypatch.setattr(
        tensor_files, "CHUNK", 1000
    )  # bytes: several chunks a tensor, the last one short
    stored, here = getattr(torch, stored), getattr(torch, here)
    model, found = build(SMALL, dtype=stored), empty(SMALL, here)
    hf.export(model, tmp_path / "out")
    hf.load_into(found, tmp_path / "out")
    assert same_weights(found, model.to(here))


def save_composer(path, model, more=None, **state):
    """A checkpoint as Composer's trainer saves it: names with a prefix, optimizer, times, random states."""
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
    cfg = replace(SMALL, qk_ln=True, tie_word_embeddings=False)
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
    with pytest.raises(UserError, match="put its config.json beside it"):
        hf.settings_of(path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config.config_to(cfg)))
    assert hf.settings_of(path) == cfg

    save_composer(path, model, {"metrics": launch})  # an object of no known kind
    with pytest.raises(UserError, match="with weights_only=True: .*conftest.launch"):
        hf.load_into(found, path)


# --- onto ranks


def fill_on(world, folder, cfg, mode, dtype):
    """Fill a model under a sharding; return its logits, and whether its parameters are whole on each rank."""
    train = TrainConfig(sharding=mode, shard_size=world.global_size // 2)
    with torch.device("meta"):
        model = MPT(cfg).to(dtype)
    model = parallel.parallelize(model, parallel.make_mesh(world, train), train, "fp32")
    parallel.materialize(model, world.device, None)
    load.init_from(model, folder)
    whole = {p.to_local().shape == p.shape for p in model.parameters()}
    with torch.no_grad():
        return model.eval()(tokens(cfg)).numpy(), whole


@pytest.mark.parametrize("size, mode", [(2, "FULL_SHARD"), (2, "DDP"), (4, "HYBRID_SHARD")])
def test_straight_onto_ranks(ranks, size, mode, tmp_path):
    """Vocabulary and width divide by neither 2 nor 4, so the last rank has fewer rows."""
    cfg = MPTConfig(d_model=30, n_heads=5, n_layers=2, max_seq_len=20, vocab_size=101, qk_ln=True)
    model = build(cfg, dtype=torch.double)
    hf.export(model, tmp_path / "out", max_bytes=20_000)
    with torch.no_grad():
        wanted = model(tokens(cfg))
    for logits, whole in ranks(size)(fill_on, str(tmp_path / "out"), cfg, mode, torch.double):
        assert whole == {mode == "DDP"}
        assert relative_error(torch.from_numpy(logits), wanted) < 1e-12


def fill_placed(world, folder, cfg):
    """Fill tensors in many placements on two mesh dimensions; those that do not hold what they should."""
    mesh, weights, wrong = init_device_mesh("cpu", (2, 2)), build(cfg).state_dict(), []
    layout = hf.find_tensors(Path(folder), MPT(cfg))
    pairs = [
        (Shard(0), Shard(1)),
        (Shard(1), Replicate()),
        (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0)),
    ]
    for name in (
        "transformer.wte.weight",
        "transformer.blocks.0.attn.out_proj.weight",
        "transformer.norm_f.bias",
    ):
        for pair in pairs[2 * (weights[name].dim() == 1) :]:
            wanted = distribute_tensor(weights[name], mesh, pair, src_data_rank=None)
            found = torch.full_like(wanted, torch.nan)
            tensor_files.fill(found, layout[name])
            if not (found.placements == pair and torch.equal(found.to_local(), wanted.to_local())):
                wrong.append((name, pair))
    return wrong


def test_any_placement(ranks, tmp_path):
    cfg = replace(SMALL, vocab_size=101)
    hf.export(build(cfg), tmp_path / "out")
    assert ranks(4)(fill_placed, str(tmp_path / "out"), cfg) == [[]] * 4


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
    hf.load_into(MPT(hf.settings_of(argv[1])), argv[1])  # what the first reading of all asks for, once
    before = peak()
    hf.load_into(model, argv[0])
    sizes = [sum(p.numel() for p in model.parameters()), sum(p.to_local().numel() for p in model.parameters())]
    print("measured", peak() - before, 4 * sizes[0], 4 * sizes[1], flush=True)

processes.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_a_rank_never_holds_the_whole_model(safe, tmp_path):
    """350 MB in one file, onto two ranks: each grows by its half and little more."""
    tiny = MPT(replace(SMALL, **LIKE_TRANSFORMERS))
    large = MPT(
        replace(SMALL, d_model=768, n_heads=12, n_layers=7, vocab_size=50368, **LIKE_TRANSFORMERS)
    )
    for name, model in (("tiny", tiny), ("large", large)):
        hf.export(model, tmp_path / name)
        if not safe:
            as_bin(tmp_path / name)
    (tmp_path / "measure.py").write_text(MEASURE)
    done = launch([*TORCHRUN, "2"], tmp_path, ["large", "tiny"], program=tmp_path / "measure.py")
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("measured")]
    assert len(lines) == 2, done.stderr
    for grown, whole, part in (map(int, line) for line in lines):
        assert whole > 3.4e8 and 0.9 * part < grown < part + 5e7 < 0.7 * whole


# --- a run of ours from theirs, and theirs from a run of ours


def test_import_sample_and_export(tmp_path, capsys):
    cfg = replace(SMALL, vocab_size=300, alibi=True, max_seq_len=64)
    model = build(cfg, dtype=torch.bfloat16)
    hf.export(model, tmp_path / "theirs", max_bytes=40_000)
    hf.main(["import", str(tmp_path / "theirs"), str(tmp_path / "run"), "--tokenizer=bytes"])
    assert "Tokenizer: bytes. A model" in capsys.readouterr().out

    found, tokenizer, name = load.load_for_sampling(
        str(tmp_path / "run"), None, torch.device("cpu")
    )
    assert tokenizer.name == "bytes" and name.endswith("step-0") and found.cfg == cfg
    assert same_weights(found, model.float())
    step = tmp_path / "run/checkpoints/step-0"
    wanted = checkpoint_files.read_checksums(step)
    assert {"meta.json", ".metadata"} < set(wanted)
    assert all(
        checkpoint_files.fault(step / file, *numbers) is None for file, numbers in wanted.items()
    )
    weights = sum(path.stat().st_size for path in step.glob("*.distcp"))
    assert (
        weights < 1.2 * sum(2 * p.numel() for p in found.parameters()) + 50_000
    )  # it keeps their dtype

    hf.main(["export", str(tmp_path / "run"), str(tmp_path / "back")])
    assert "written. Tokenizer: bytes\n" in capsys.readouterr().out
    again = empty(hf.settings_of(tmp_path / "back"), torch.bfloat16)
    hf.load_into(again, tmp_path / "back")
    assert same_weights(again, model.bfloat16())
    assert files.read_json(tmp_path / "back/config.json")["torch_dtype"] == "bfloat16"
    hf.import_(tmp_path / "back", tmp_path / "again")  # the tokenizer's name went along
    assert checkpoint.read_meta(tmp_path / "again/checkpoints/step-0")["tokenizer"] == "bytes"


def test_a_tokenizer_trained_here_goes_along(tmp_path):
    bpe = tokenizers.train_bpe(["the cat and the dog and the cat"] * 3, 260)
    hf.export(build(replace(SMALL, vocab_size=264)), tmp_path / "theirs")
    bpe.save(tmp_path / "theirs" / hf.BPE_TOKENIZER)
    hf.import_(tmp_path / "theirs", tmp_path / "run", bpe.name)
    hf.export(tmp_path / "run", tmp_path / "back")
    hf.import_(tmp_path / "back", tmp_path / "again")
    _, found, _ = load.load_for_sampling(str(tmp_path / "again"), None, torch.device("cpu"))
    assert found.fingerprint == bpe.fingerprint and found.name == bpe.name


def test_the_tokenizer_must_be_ours_and_fit(theirs, tmp_path):
    hf.export(build(SMALL), tmp_path / "small")
    settings = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(
        json.dumps(settings | {"tokenizer_name": "EleutherAI/gpt-neox-20b"})
    )
    with pytest.raises(
        UserError,
        match="wants the tokenizer EleutherAI/gpt-neox-20b: put its tokenizer.json there, or",
    ):
        hf.import_(theirs, tmp_path / "run")
    with pytest.raises(UserError, match="bytes has 257 ids, but the model's vocab_size is 97"):
        hf.import_(tmp_path / "small", tmp_path / "run", "bytes")
    assert not (tmp_path / "run").exists()


def test_their_tokenizer_is_taken(theirs, tmp_path):
    """tokenizer.json beside the weights, cut by Hugging Face's package; it goes with the run back to their folder."""
    library = pytest.importorskip("tokenizers")
    made = library.ByteLevelBPETokenizer()
    made.train_from_iterator(
        ["the cat and the dog and the cat"], 270, special_tokens=["<|endoftext|>"]
    )
    made.save(str(theirs / "tokenizer.json"))
    hf.import_(theirs, tmp_path / "run")
    _, found, _ = load.load_for_sampling(str(tmp_path / "run"), None, torch.device("cpu"))
    assert (
        found.name == str(theirs / "tokenizer.json")
        and found.encode("the cat").tolist() == made.encode("the cat").ids
    )
    hf.main(["export", str(tmp_path / "run"), str(tmp_path / "back")])
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (
        theirs / "tokenizer.json"
    ).read_bytes()


# --- what is broken


def shorten(path, by=100):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - by)


def rewrite(folder, change):
    """Put the tensors of a folder into one file, changed."""
    state = MPT(hf.settings_of(folder)).state_dict()
    for path in folder.glob("model*"):
        path.unlink()
    change(state)
    tensor_files.write_safetensors(folder / "model.safetensors", state)


def overwrite(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


BROKEN = {
    "00001-of-.*safetensors is truncated or damaged: .* bytes instead of": lambda f: shorten(
        first(f)
    ),
    r"names \d+ files, but model-00001-of-\d+.safetensors is not there": lambda f: first(
        f
    ).unlink(),
    "No such file or directory: .*config.json": lambda f: (f / "config.json").unlink(),
    r"config.json is damaged \(Expecting": lambda f: (f / "config.json").write_text("{"),
    r"index.json is damaged \(": lambda f: shorten(f / "model.safetensors.index.json"),
    "no weights in .*expected model.safetensors": lambda f: [
        path.unlink() for path in f.glob("model*")
    ],
    "is no safetensors file, or is damaged": lambda f: first(f).write_bytes(
        b"version https://git-lfs.github.com"
    ),
    "no safetensors file, or is damaged: a header of": lambda f: first(f).write_bytes(b""),
    "no safetensors file, or is damaged: .*position": lambda f: overwrite(first(f), 0, b"\x00\x01"),
    "model_type 'gpt2'": lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'),
    r"lacks 1 tensors of this model, such as \['transformer.norm_f.weight'\]": lambda f: rewrite(
        f, lambda state: state.pop("transformer.norm_f.weight")
    ),
    r"holds 1 tensors that this model lacks, such as \['transformer.wpe.weight'\]": lambda f: (
        rewrite(f, lambda state: state.update({"transformer.wpe.weight": torch.zeros(3, 48)}))
    ),
    r"norm_f.weight is \(7,\) in .*, but \(48,\) in this model": lambda f: rewrite(
        f, lambda state: state.update({"transformer.norm_f.weight": torch.zeros(7)})
    ),
    "lm_head.weight in .* differs from the embedding": lambda f: rewrite(
        f, lambda state: state.update({"lm_head.weight": state["transformer.wte.weight"] + 1})
    ),
    "is I64, expected one of: F64": lambda f: overwrite_dtype(first(f)),
    "twice, the second time in": lambda f: twice(f),
}


def first(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def overwrite_dtype(path):
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I64"', 1))


def twice(folder):
    sorted(folder.glob("*.safetensors"))[1].write_bytes(first(folder).read_bytes())


@pytest.mark.parametrize("message", BROKEN)
def test_what_is_broken_is_named_in_one_line(message, theirs, tmp_path):
    BROKEN[message](theirs)
    with pytest.raises((UserError, OSError), match=message) as error:
        hf.import_(theirs, tmp_path / "run", "bytes")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_broken_bin_files(tmp_path):
    model, path = build(SMALL), tmp_path / "pytorch_model.bin"
    (tmp_path / "config.json").write_text(json.dumps(hf_config.config_to(SMALL)))
    torch.save(model.state_dict(), path)
    shorten(path)
    with pytest.raises(UserError, match="cannot read .*pytorch_model.bin with weights_only=True"):
        hf.load_into(model, tmp_path)
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="format of torch before 1.6"):
        hf.load_into(model, tmp_path)
    torch.save(model.state_dict() | {"transformer.wte.weight": torch.zeros(48, 97).T}, path)
    with pytest.raises(UserError, match="wte.weight in .* is not a contiguous tensor"):
        hf.load_into(model, tmp_path)
    torch.save(model, path)
    with pytest.raises(UserError, match="with weights_only=True: .*model.MPT"):
        hf.load_into(model, tmp_path)
    torch.save([1, 2], path)
    with pytest.raises(UserError, match="holds no dictionary of weights"):
        hf.load_into(model, tmp_path)


def test_a_file_that_shrinks_while_it_is_read(theirs):
    model = MPT(hf.settings_of(theirs))
    layout = hf.find_tensors(theirs, model)
    shorten(layout["transformer.wte.weight"].file, by=10_000)
    with pytest.raises(UserError, match="is truncated: it ends within a tensor"):
        tensor_files.fill(model.transformer.wte.weight, layout["transformer.wte.weight"])


def test_a_tied_head_that_is_there_is_equal(theirs, monkeypatch):
    """As older versions of transformers write it: under both names."""
    monkeypatch.setattr(tensor_files, "CHUNK", 1000)
    rewrite(
        theirs,
        lambda state: state.update({"lm_head.weight": state["transformer.wte.weight"].clone()}),
    )
    model = empty(hf.settings_of(theirs))
    hf.load_into(model, theirs)
    assert all(p.isfinite().all() for p in model.parameters())


def test_nothing_is_half_written(tmp_path, theirs):
    """A disk that is full while files are written, in both directions; a target that is there."""
    hf.export(build(replace(SMALL, vocab_size=300)), tmp_path / "fits")
    before = sorted(path.name for path in tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(UserError, match="could not write .*out: .*File too large"):
            hf.export(build(SMALL), tmp_path / "out")
        with pytest.raises(UserError, match="could not write .*run: .*File too large"):
            hf.import_(tmp_path / "fits", tmp_path / "run", "bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(UserError, match="fits is there already"):
        hf.export(build(SMALL), tmp_path / "fits")
    with pytest.raises(UserError, match="fits is there already"):
        hf.import_(tmp_path / "fits", tmp_path / "fits", "bytes")
    with pytest.raises(UserError, match="could not write"):
        hf.export(build(SMALL), tmp_path / "fits/config.json/out")  # a file in the way
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    (tmp_path / "empty").mkdir()
    hf.export(build(SMALL), tmp_path / "empty")
    assert hf.settings_of(tmp_path / "empty") == SMALL


def test_a_mistake_is_one_line(python, tmp_path):
    done = python("export", "nowhere", "out", program="weights/hf.py")
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("error: no checkpoint in 'nowhere'") and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    "more, words",
    [
        ({"attn_config": [1]}, "attn_config and ffn_config must be objects"),
        ({"attn_config": {"attn_type": ["x"]}}, "sets attn_type to"),
    ],
)
def test_odd_settings_are_told(more, words):
    with pytest.raises(UserError, match=words):
        hf_config.config_from({"model_type": "mpt"} | more)
    assert hf_config.config_from({"model_type": "mpt", "architectures": [1]}).alibi is False
    plain = {"rope": True, "rope_dail_config": None, "alibi": False}
    assert hf_config.config_from(
        {"model_type": "mpt", "attn_config": plain, "learned_pos_emb": False}
    ).rope


@pytest.mark.parametrize("more", VARIANTS.values(), ids=VARIANTS)
def test_the_weights_of_the_format_are_those_of_our_model(more):
    cfg = replace(SMALL, **more)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in MPT(cfg).state_dict().items()}
    assert hf_config.weights_in_format(cfg) == shapes


class Gated(torch.nn.Module):
    """A feed-forward as a forker writes it: SwiGLU."""

    def __init__(self, ffn):
        super().__init__()
        self.up_proj, self.down_proj = ffn.up_proj, ffn.down_proj
        self.gate_proj = torch.nn.Linear(48, 192, bias=False)

    def forward(self, x):
        return self.down_proj(self.up_proj(x) * torch.nn.functional.silu(self.gate_proj(x)))


def gated(cfg):
    model = build(cfg)
    for block in model.transformer.blocks:
        block.ffn = Gated(block.ffn)
    return model


@pytest.mark.parametrize("live", [True, False])
def test_weights_that_the_format_lacks_are_not_exported(live, tmp_path, python):
    model = gated(SMALL)
    if live:
        with pytest.raises(UserError, match="ffn.gate_proj.weight") as error:
            hf.export(model, tmp_path / "out")
        assert "\n" not in str(error.value)
    else:
        folder = tmp_path / "checkpoints/step-3"
        folder.parent.mkdir()
        made = {"precision": "fp32", "data_fingerprint": "f00"}
        checkpoint.prepare(
            folder, {"step": 3, **asdict(SMALL), **asdict(TrainConfig(tokenizer="bytes")), **made}
        )
        writer = checkpoint.Writer(folder)
        torch.distributed.checkpoint.save(
            {"model": model.state_dict()}, storage_writer=writer, no_dist=True
        )
        done = python("export", tmp_path, tmp_path / "out", program="weights/hf.py")
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert (
            "2 weights are not those of an MPT: transformer.blocks.0.ffn.gate_proj.weight"
            in done.stderr
        )
    assert not (tmp_path / "out").exists()
    smaller = replace(SMALL, expansion_ratio=2)
    with pytest.raises(UserError, match=r"up_proj.weight \(192, 48\) instead of \(96, 48\)"):
        hf_config.check_format(build(SMALL).state_dict(), smaller)


@dataclass
class Forked(MPTConfig):
    """Settings as a forker adds them."""

    window: int = 0
    norm_type: str = "low_precision_layernorm"


@pytest.mark.parametrize(
    "name, value", [("window", 8), ("norm_type", "rmsnorm"), ("norm_type", "low_precision_rmsnorm")]
)
def test_settings_that_the_format_lacks_are_not_exported(name, value):
    cfg = Forked(**asdict(SMALL))
    assert hf_config.config_to(cfg) == hf_config.config_to(SMALL)
    with pytest.raises(UserError, match=f"{name}={value}.*this format|this format.*{name}={value}"):
        hf_config.config_to(replace(cfg, **{name: value}))


NESTED = json.loads("[" * 500 + "]" * 500)


@pytest.mark.parametrize(
    "value",
    [[1], {"a": 1}, NESTED, float("nan"), float("inf"), 10**400, -(2**63), "64", None, True],
)
@pytest.mark.parametrize(
    "key", ["d_model", "n_layers", "expansion_ratio", "logit_scale", "norm_type"]
)
def test_settings_of_a_wrong_type_are_one_line(key, value, tmp_path):
    """A result where the format allows it (logit_scale may be null), else the name of the file and of the setting."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mpt", "attn_config": {}} | {key: value}))
    try:
        hf_config.config_from(files.read_json(file), str(file))
    except UserError as error:
        assert (
            "\n" not in str(error)
            and str(file) in str(error)
            and key in str(error)
            and len(str(error)) < 400
        )
    else:
        assert key == "logit_scale" and value is None


@pytest.mark.parametrize(
    "key", ["architectures", "attn_config", "ffn_config", "model_type", "what_is_this"]
)
@pytest.mark.parametrize("value", [7, "x", {"a": NESTED}])
def test_groups_of_a_wrong_type_are_one_line(key, value):
    with pytest.raises(UserError) as error:
        hf_config.config_from({"model_type": "mpt"} | {key: value}, "their/config.json")
    assert "\n" not in str(error.value) and str(error.value).startswith("their/config.json")


@pytest.mark.parametrize(
    "state", [7, [1], "x", None, {}, {"model": 7}, {"model": [1]}, {"model": {1: 2}}, torch.ones(2)]
)
def test_a_composer_state_of_a_wrong_type_is_one_line(state, tmp_path):
    path = tmp_path / "ep0.pt"
    torch.save({"state": state}, path)
    with pytest.raises(UserError, match="ep0.pt does not hold its model's settings"):
        hf.settings_of(path)
    with pytest.raises(UserError, match="ep0.pt") as error:
        tensor_files.locate(path)
    assert "\n" not in str(error.value)
    held = {"integrations": {"huggingface": {"model": {"config": {"content": state}}}}}
    torch.save({"state": held}, path)
    with pytest.raises(UserError, match="ep0.pt"):
        hf.settings_of(path)

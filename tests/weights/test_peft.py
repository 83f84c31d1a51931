"""weights/peft.py against the real `peft` on transformers' MPT: the same logits both ways."""

import copy
import functools
import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import flags_for, refusal
from launches import train_here
from test_hf import LIKE_TRANSFORMERS, SMALL, build, relative_error, tokens

import generate
import lora
from config import LINEAR_LAYERS, TrainConfig
from evaluation import zero_shot
from evaluation.zero_shot import fingerprint
from lifecycle import runlog
from program import UserError
from serving.decoder import Decoder
from storage import checkpoint_files
from storage.checkpoint_files import read_metadata
from weights import hf, load, peft, tensor_files

CPU = torch.device("cpu")
CFG = replace(SMALL, n_layers=3, vocab_size=300, **LIKE_TRANSFORMERS)
GATED = replace(CFG, ffn_type="mptglu", ffn_act_fn="silu", norm_type="rmsnorm")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
TUNE = TrainConfig(init_from="base", lora_rank=4)
THEIRS = pytest.importorskip("peft", reason="see requirements-dev.txt")
PREFIX = "base_model.model.transformer.blocks."


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A Hugging Face folder with a small model, whose tokenizer is bytes."""
    folder = tmp_path_factory.mktemp("hf") / "base"
    hf.export(build(CFG), folder)
    name_tokenizer(folder)
    return folder


def name_tokenizer(folder):
    """As hf.export does for a run: here, bytes."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tokenizer_name": "bytes"}))


@functools.cache
def loaded(folder):
    return pytest.importorskip("transformers").MptForCausalLM.from_pretrained(folder).eval()


def their_model(folder):
    return copy.deepcopy(loaded(folder))


def with_adapters(settings, cfg=CFG):
    """Our model (of `base`) with adapters as if they had been trained."""
    model = build(cfg)
    lora.put_on(model, settings)
    generator = torch.Generator().manual_seed(5)
    for param in lora.adapters_of(model).values():
        param.data = torch.randn(param.shape, generator=generator) / 10
    return model


def write(folder, model, settings, base=""):
    """Write the adapters of a model as a PEFT folder."""
    peft.write(folder, peft.Adapter(settings, lora.adapters_of(model), base))


def trained_by_them(base, folder, **settings):
    """Let peft put adapters on, as if they had been trained, and write them. Returns its model."""
    settings = {"r": 4, "target_modules": LINEAR_LAYERS, "task_type": "CAUSAL_LM"} | settings
    model = THEIRS.get_peft_model(their_model(base), THEIRS.LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(6)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = torch.randn(param.shape, generator=generator) / 10
    model.save_pretrained(folder)
    return model


def their_adapted(base, folder):
    """(Their model with the adapters of a folder, what peft reports missing or unexpected)."""
    model = THEIRS.PeftModel.from_pretrained(their_model(base), folder).eval()
    report = model.load_adapter(folder, "once_more")
    model.set_adapter("default")
    return model, report.missing_keys + report.unexpected_keys


@torch.no_grad()
def difference(*models):
    """Between the logits of two models, ours or theirs, relative to the largest."""
    outputs = [model(tokens(CFG)) for model in models]
    return relative_error(*[getattr(found, "logits", found) for found in outputs])


def change_config(folder, **values):
    """Change settings of adapter_config.json; None removes one."""
    path = folder / peft.CONFIG_FILE
    settings = json.loads(path.read_text()) | values
    kept = {name: value for name, value in settings.items() if values.get(name, 0) is not None}
    path.write_text(json.dumps(kept))


def rewrite(folder, change):
    """Change the tensors of a PEFT folder by name, in place."""
    state = {name: x.clone() for name, x in peft.read(folder).tensors.items()}
    state = {f"base_model.model.{name}.weight": tensor for name, tensor in state.items()}
    change(state)
    tensor_files.write_safetensors(folder / peft.TENSOR_FILE, state)


# --- what we write, they read


WRITTEN = {
    "some layers": {"lora_targets": "down_proj,Wqkv"},
    "last blocks": {"lora_last_blocks": 2, "lora_alpha": 12.5},
    "rslora": {"rslora": True, "lora_alpha": 3.0, "lora_dropout": 0.25},
}


@pytest.mark.parametrize("more", WRITTEN.values(), ids=WRITTEN)
def test_they_read_what_we_write(more, base, tmp_path):
    settings = replace(TUNE, **more)
    ours = with_adapters(settings)
    write(tmp_path / "out", ours, settings, str(base))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="peft")
        theirs, faults = their_adapted(base, tmp_path / "out")
    assert not faults
    assert difference(ours, theirs) < 1e-5 < 1e-2 < difference(build(CFG), theirs)

    found = theirs.peft_config["default"]
    assert (found.r, found.lora_alpha) == (settings.lora_rank, settings.lora_alpha)
    assert found.lora_dropout == settings.lora_dropout and found.use_rslora == settings.rslora
    assert found.target_modules == set(CFG.adapted_layers(settings.lora_targets))

    again = peft.read(tmp_path / "out")
    assert (again.rank, again.scale) == (settings.lora_rank, settings.lora_scale)
    assert again.base == str(base)
    placed = CFG.adapted_layers(peft.placed(again, CFG).lora_targets)
    assert placed == CFG.adapted_layers(settings.lora_targets)
    assert peft.placed(again, CFG).lora_last_blocks == settings.lora_last_blocks
    for name, tensor in lora.adapters_of(ours).items():
        assert torch.equal(again.tensors[name], tensor)


@torch.no_grad()
def test_adapters_of_a_gated_feed_forward(tmp_path):
    """There and back. peft gets our model: that of transformers has no gate_proj."""
    ids = tokens(GATED)
    ours = with_adapters(TUNE, GATED)
    write(tmp_path / "ours", ours, TUNE, str(tmp_path / "base"))
    change_config(tmp_path / "ours", task_type=None)  # CAUSAL_LM is for models of transformers
    theirs = THEIRS.PeftModel.from_pretrained(build(GATED), tmp_path / "ours").eval()
    assert relative_error(theirs(ids), ours(ids)) < 1e-5
    assert relative_error(build(GATED)(ids), ours(ids)) > 1e-2

    theirs.save_pretrained(tmp_path / "theirs")
    found = peft.read(tmp_path / "theirs")
    assert "transformer.blocks.2.ffn.gate_proj.lora_B" in found.tensors
    assert found.tensors.keys() == lora.adapters_of(ours).keys()
    for name, tensor in lora.adapters_of(ours).items():
        assert torch.equal(found.tensors[name], tensor)

    hf.export(build(GATED), tmp_path / "base")
    name_tokenizer(tmp_path / "base")
    peft.import_(tmp_path / "theirs", tmp_path / "run", str(tmp_path / "base"))
    peft.merge(tmp_path / "run", tmp_path / "merged")
    for run in ("run", "merged"):
        found, _, _ = load.load_for_sampling(str(tmp_path / run), None, CPU)
        assert relative_error(found(ids), ours(ids)) < 1e-5


def test_what_peft_cannot_hold_is_not_written(tmp_path):
    settings = replace(TUNE, lora_train="norms")
    message = refusal(write, tmp_path / "out", with_adapters(settings), settings)
    assert "lora_train=norms" in message and "python -m weights.peft" in message
    assert not (tmp_path / "out").exists()


# --- what they write, we read


READ = {
    "list": {"target_modules": ["Wqkv", "up_proj"], "lora_dropout": 0.3},
    "paths": {"target_modules": ["transformer.blocks.2.attn.Wqkv", "blocks.0.ffn.up_proj"]},
    "pattern": {"target_modules": r".*\.blocks\.[12]\.(attn\.out_proj|ffn\.down_proj)"},
    "all-linear": {"target_modules": "all-linear"},
    "layers": {"layers_to_transform": [1], "layers_pattern": "blocks"},
    "default targets": {"target_modules": None, "layers_to_transform": 2},
    "rslora": {"use_rslora": True, "lora_alpha": 5, "init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("more", READ.values(), ids=READ)
def test_we_read_what_they_write_and_they_what_we_write_of_it(more, base, tmp_path):
    """What we write has the layers of the tensors: the settings that were read name none."""
    theirs = trained_by_them(base, tmp_path / "theirs", **more)
    found = peft.read(tmp_path / "theirs")
    ours = load.with_adapter(base, CFG, found, CPU)
    assert difference(ours, theirs) < 1e-5 < 1e-3 < difference(build(CFG), theirs)
    assert found.settings.lora_dropout == more.get("lora_dropout", 0)
    assert lora.merge(ours) == 0
    assert difference(ours, theirs) < 1e-5

    peft.write(tmp_path / "ours", found)
    again, faults = their_adapted(base, tmp_path / "ours")
    assert not faults and difference(theirs, again) == 0


def test_null_is_the_default_for_them_and_for_us(base, tmp_path):
    theirs = trained_by_them(base, tmp_path / "out")
    path = tmp_path / "out" / peft.CONFIG_FILE
    settings = json.loads(path.read_text())
    needed = "peft_type r lora_alpha target_modules bias lora_dropout rank_pattern alpha_pattern"
    nulls = {name: None for name in settings if name not in needed.split()}
    assert {"use_rslora", "init_lora_weights", "fan_in_fan_out"} < set(nulls)
    path.write_text(json.dumps(settings | nulls))
    again, faults = their_adapted(base, tmp_path / "out")
    ours = load.with_adapter(base, CFG, peft.read(tmp_path / "out"), CPU)
    assert not faults and difference(theirs, again) == 0 and difference(ours, theirs) < 1e-5
    path.write_text(json.dumps(settings | nulls | {"lora_dropout": None}))
    assert peft.read(tmp_path / "out").settings.lora_dropout == 0  # peft fails at None > 0
    for init in (False, "orthogonal"):
        path.write_text(json.dumps(settings | {"init_lora_weights": init}))
        peft.read(tmp_path / "out")


def test_tensors_in_bf16(sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "out")
    wanted = {name: x.bfloat16() for name, x in peft.read(folder).tensors.items()}
    rewrite(folder, lambda state: state.update({k: v.bfloat16() for k, v in state.items()}))
    found = peft.read(folder).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_file_is_mapped_and_stays_as_it_is(sound):
    file = sound / peft.TENSOR_FILE
    before = file.read_bytes()
    tensors = peft.read(sound).tensors
    assert any(str(file) in line for line in Path("/proc/self/maps").read_text().splitlines())
    for tensor in tensors.values():
        tensor.zero_()  # of this process alone
    assert file.read_bytes() == before


# --- what cannot be represented is refused by name


REFUSED = {
    "use_dora to True": {"use_dora": True},
    "rank_pattern to dict": {"rank_pattern": {"Wqkv": 2}},
    "bias to 'all'": {"bias": "all"},
    "init_lora_weights to 'pissa'": {"init_lora_weights": "pissa"},
    "wte": {"target_modules": ["wte", "Wqkv"]},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_lora_py_lacks_is_refused_by_name(named, base, tmp_path):
    """As the real package writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft has its own doubts about some of them
        trained_by_them(base, tmp_path / "theirs", **REFUSED[named])
    assert named in refusal(peft.read, tmp_path / "theirs")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A PEFT folder that nobody changes."""
    folder = tmp_path_factory.mktemp("peft") / "sound"
    write(folder, with_adapters(TUNE), TUNE, "base")
    return folder


BROKEN_CONFIG = [
    ({"fan_in_fan_out": True}, "sets fan_in_fan_out to True"),
    ({"from_the_future": 0}, "sets from_the_future to 0"),
    ({"init_lora_weights": 1}, "sets init_lora_weights to 1"),
    ({"peft_type": "IA3"}, "peft_type 'IA3': only LORA can be read"),
    ({"r": True}, "'r' is True"),
    ({"r": 0}, "r is 0, so there is no update"),
    ({"r": 2}, r"lora_A is \(4, 48\) in .*, expected \(2, in\), since r is 2"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be from .* not nan"),
    ({"use_rslora": 1}, "'use_rslora' is 1"),
]
A0 = f"{PREFIX}0.attn.Wqkv.lora_A.weight"
BROKEN_TENSORS = [
    (lambda f: shutil.rmtree(f), "no adapter in .*out, which does not exist"),
    (
        lambda f: (f / peft.TENSOR_FILE).rename(f / "adapter_model.bin"),
        "out has no adapter_model.safetensors beside adapter_config.json: load it with a current",
    ),
    (lambda f: rewrite(f, dict.clear), "holds no tensors"),
    (lambda f: rewrite(f, lambda s: s.pop(A0)), "Wqkv has lora_B but no lora_A"),
    (
        lambda f: rewrite(f, lambda s: s[A0].view(-1)[5:6].fill_(torch.nan)),
        r"lora_A in .* contains NaN or infinity",
    ),
    (lambda f: rewrite(f, lambda s: s.update({A0: s[A0][0]})), r"lora_A is \(48,\)"),
    (
        lambda f: rewrite(f, lambda s: s.update(x=s.pop(A0))),
        "holds x, no adapter of a linear layer",
    ),
]
BROKEN = [(lambda f, more=more: change_config(f, **more), text) for more, text in BROKEN_CONFIG]


@pytest.mark.parametrize("damage, message", BROKEN + BROKEN_TENSORS)
def test_what_is_broken_is_one_line(damage, message, sound, base, tmp_path):
    shutil.copytree(sound, tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises((UserError, OSError), match=message) as error:
        peft.import_(tmp_path / "out", tmp_path / "run", str(base))
    assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"out"}


# --- on a base


@pytest.mark.parametrize(
    "other, message",
    [
        ({"n_layers": 2}, "blocks.2.attn.Wqkv.lora_A"),
        ({"d_model": 96}, "Wqkv.lora_A is (4, 48), but (4, 96) would fit"),
        ({"kv_n_heads": 1}, "Wqkv.lora_B is (144, 4), but (64, 4) would fit"),
    ],
)
def test_an_adapter_of_another_base_is_one_line(other, message, sound, tmp_path):
    hf.export(build(replace(CFG, **other)), tmp_path / "other")
    for use in (peft.import_, peft.merge):
        text = refusal(use, sound, tmp_path / "run", str(tmp_path / "other"))
        assert "the adapter is not of" in text and message in text
    assert not (tmp_path / "run").exists()


def test_an_adapter_of_a_gate_that_the_base_lacks_is_one_line(base, tmp_path):
    write(tmp_path / "gated", with_adapters(TUNE, GATED), TUNE)
    for use in (peft.import_, peft.merge):
        text = refusal(use, tmp_path / "gated", tmp_path / "run", str(base))
        assert "blocks.0.ffn.gate_proj.lora_A" in text
        assert f"{base} has no gate_proj: its ffn_type is mptmlp" in text


@pytest.mark.parametrize(
    "more, blocks",
    [
        ({"layers_to_transform": [0, 1]}, "[0, 1]"),
        ({"target_modules": r".*(1\.attn\.Wqkv|2\.ffn\.up_proj)"}, "[1, 2]"),
    ],
)
def test_layers_that_no_run_can_have_are_merged_not_imported(more, blocks, base, tmp_path):
    theirs = trained_by_them(base, tmp_path / "theirs", **more)
    message = refusal(peft.import_, tmp_path / "theirs", tmp_path / "run", str(base))
    assert f"(blocks {blocks}): merge it" in message
    assert not (tmp_path / "run").exists()
    peft.merge(tmp_path / "theirs", tmp_path / "run", str(base))
    merged, _, _ = load.load_for_sampling(str(tmp_path / "run"), None, CPU)
    assert difference(merged, theirs) < 1e-5


def test_there_and_back(base, tmp_path, capsys):
    """PEFT -> a run -> PEFT: equal tensors. The run samples as their model, and merges to it."""
    theirs = trained_by_them(base, tmp_path / "theirs", layers_to_transform=[1, 2], lora_alpha=12)
    run = tmp_path / "run"
    peft.main(["import", str(tmp_path / "theirs"), str(run), f"--init_from={base}"])
    assert f"adapters of rank 4 on {base}" in capsys.readouterr().out
    step = run / "checkpoints/step-0"
    assert checkpoint_files.read_adapter_settings(step) == TrainConfig(
        init_from=str(base),
        lora_rank=4,
        lora_alpha=12,
        lora_last_blocks=2,
        lora_targets="Wqkv,out_proj,up_proj,down_proj",
    )
    assert set(hf.weights_of(read_metadata(step))) == set(peft.read(tmp_path / "theirs").tensors)
    sampled, tokenizer, name = load.load_for_sampling(str(run), None, CPU)
    assert tokenizer.name == "bytes" and name.endswith("step-0")
    assert difference(sampled, theirs) < 1e-5

    peft.main(["export", str(run), str(tmp_path / "back"), "--base_model=mosaicml/mpt"])
    first, second = peft.read(tmp_path / "theirs"), peft.read(tmp_path / "back")
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    assert second.base == "mosaicml/mpt" and second.scale == first.scale
    again, faults = their_adapted(base, tmp_path / "back")
    assert not faults and difference(again, theirs) == 0

    capsys.readouterr()
    peft.main(["merge", str(run), str(tmp_path / "merged")])
    rounding, logits = changes_in(capsys.readouterr().out)
    assert rounding == ("float32", 0) and 0 < logits < 1e-4
    merged, _, _ = load.load_for_sampling(str(tmp_path / "merged"), None, CPU)
    assert difference(merged, theirs) < 1e-5
    hf.export(tmp_path / "merged", tmp_path / "whole")
    assert difference(merged, their_model(tmp_path / "whole")) < 1e-5


def changes_in(out: str):
    """What merging says: ((the dtype, how much rounding changes a weight), and a logit)."""
    rounding = re.search(r"Rounding to (\w+) changes a weight by at most (\S+)", out)
    logits = re.search(r"changes the logits of 40 random ids by at most (\S+);", out)
    return (rounding[1], float(rounding[2])), float(logits[1])


def largest_error(model, base, adapter) -> float:
    """How far the adapted weights of a model are from W + s B A at most."""
    errors = []
    for name, layer in adapter.named_modules():
        if hasattr(layer, "lora_A"):
            exact = base.get_submodule(name).weight + lora.delta(layer)
            errors.append((model.get_submodule(name).weight - exact).abs().max().item())
    assert len(errors) == 12
    return max(errors)


@pytest.fixture(scope="module")
def tuned_half(tmp_path_factory) -> Path:
    """A run with adapters on a base that is stored in bf16."""
    folder = tmp_path_factory.mktemp("half")
    hf.export(build(CFG, dtype=torch.bfloat16), folder / "half")
    name_tokenizer(folder / "half")
    write(folder / "out", with_adapters(TUNE), TUNE)
    peft.import_(folder / "out", folder / "run", str(folder / "half"))
    return folder / "run"


def test_merging_into_bf16_says_what_rounding_costs(tuned_half, tmp_path, capsys):
    """The weights of a base in bf16 stay so, but where the caller computes in fp32.

    The error is that of the last bit.
    """
    peft.main(["merge", str(tuned_half), str(tmp_path / "run")])
    (dtype, said), logits = changes_in(capsys.readouterr().out)
    meta = hf.weights_of(read_metadata(tmp_path / "run/checkpoints/step-0"))
    assert {tensor.dtype for tensor in meta.values()} == {torch.bfloat16} and dtype == "bfloat16"
    base = hf.load_model(tuned_half.parent / "half", CPU).float()
    narrow, wide = (
        load.load_for_sampling(str(tuned_half), None, CPU, in_fp32=in_fp32)[0]
        for in_fp32 in (False, True)
    )
    for merged in (load.load_for_sampling(str(tmp_path / "run"), None, CPU)[0], narrow):
        error = largest_error(merged, base, with_adapters(TUNE))
        assert said == pytest.approx(error, rel=0.05) and said > 1e-5
    assert 1e-4 < logits < 0.5
    assert {param.dtype for param in wide.parameters()} == {torch.float32}
    assert largest_error(wide, base, with_adapters(TUNE)) < 1e-6


def evaluate(_, *argv):
    zero_shot.main(list(argv))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_programs_merge_in_the_precision_that_they_compute_in(
    precision, tuned_half, tmp_path, monkeypatch, ranks
):
    """generate.py, seen as it makes its decoder; evaluation, by the hash of its weights."""
    model, _, _ = load.load_for_sampling(str(tuned_half), None, CPU, in_fp32=precision == "fp32")
    decoded = []

    def decoder(model, *rest):
        decoded.append(fingerprint(model))
        return Decoder(model, *rest)

    monkeypatch.setattr(generate, "Decoder", decoder)
    flag = f"--precision={precision}"
    generate.main([str(tuned_half), "--prompt=a", "--max_new_tokens=1", flag])
    assert decoded == [fingerprint(model)]

    (tmp_path / "a.txt").write_text("some text")
    files = [f"--tasks={tmp_path}/a.txt", f"--out={tmp_path}/out.json"]
    ranks(1)(evaluate, str(tuned_half), *files, flag)
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["settings"]["weights"] == fingerprint(model)


def test_merging_a_run_that_trained_norms_and_biases_too(tmp_path, capsys):
    """The merged model is the run's own. On a base in bf16 it is in fp32, as they were trained."""
    cfg = replace(SMALL, vocab_size=300, alibi=True, learned_pos_emb=False)
    base, tuned, merged = (tmp_path / name for name in ("base", "tuned", "merged"))
    model = build(cfg, dtype=torch.bfloat16)
    settings = replace(TUNE, init_from=str(base), lora_train="norms,biases", tokenizer="bytes")

    def save(run, state, more):
        run.mkdir()
        meta = peft.meta_of(cfg, settings, "test") | more
        hf.write_checkpoint(run / "checkpoints/step-0", meta, {"model": state})

    save(base, model.state_dict(), {"lora_rank": 0, "lora_train": ""})
    model = model.float()
    lora.put_on(model, settings)
    generator = torch.Generator().manual_seed(7)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for name, param in trained.items():
        old = 0 if lora.is_adapter(name) else param.data
        param.data = old + torch.randn(param.shape, generator=generator) / 10
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B", "weight", "bias"}
    state = {name: param.detach() for name, param in trained.items()}
    save(tuned, state, load.base_of(str(base), {}))

    peft.main(["merge", str(tuned), str(merged)])
    assert changes_in(capsys.readouterr().out)[0] == ("float32", 0)
    found, _, _ = load.load_for_sampling(str(merged), None, CPU)
    with torch.no_grad():
        assert relative_error(found(tokens(cfg)), model(tokens(cfg))) < 1e-5
        whole = load.load_model(tuned / "checkpoints/step-0", CPU)
        assert torch.equal(whole(tokens(cfg)), found(tokens(cfg)))

    load.demonstrate([str(tuned)])
    assert f"adapters of rank 4 on {base}/checkpoints/step-0" in capsys.readouterr().out


def test_a_command_that_cannot_be_done_is_one_line(sound, base, tmp_path):
    run = tmp_path / "run"
    hf.import_(base, run)
    of_base = f"--init_from={base}"
    cases = [
        (["export", run, "out"], "holds a whole model, no adapters"),
        (["merge", sound, "out", "--init_from=nope"], "--init_from=nope does not exist"),
        (["import", "nope", "out", of_base], "no adapter in nope"),
        (["merge", sound, "out"], "holds adapters alone, for base: set --init_from"),
        (["merge", run, "out"], "holds a whole model, no adapters"),
        (["import", sound, "out"], "does not hold its base: set --init_from"),
        (["import", run, "out", of_base], "expected adapter_config.json"),
        (["import", sound, run, of_base], "run is there already"),
        (["export", run, "out", of_base], "remove --init_from"),
        (["merge", sound, "out", "--base_model=x"], "only export takes --base_model"),
        (["mend", sound, "out"], "'mend' is none of export, import, merge"),
    ]
    for arguments, message in cases:
        assert message in refusal(peft.main, [str(word) for word in arguments])


# --- with the trainer

SIZE = ["--d_model=48", "--n_heads=6", "--n_layers=3", "--vocab_size=300", "--max_seq_len=40"]
SIZE += ["--alibi", "--no_bias", "--learned_pos_emb=False"]
BATCH = ["--global_batch_size=4", "--microbatch_size=4", "--max_steps=4", "--warmup_steps=1"]
BATCH += ["--eval_tokens=2000", "--precision=fp32", "--lr=1e-2"]


def curve(run):
    return [(row["step"], row.get("loss"), row.get("val_loss")) for row in runlog.read(run)]


@pytest.mark.slow
def test_a_run_of_ours_and_the_same_from_their_file(base, tiny_data, tmp_path, ranks):
    """Adapters as they are drawn, imported, train as those of a new run do.

    What comes out is in peft what it is here.
    """
    lora_flags = ["--lora_rank=4", "--lora_last_blocks=2", f"--init_from={base}", "--device=cpu"]
    flags = [*SIZE, *BATCH, *lora_flags, *flags_for(tiny_data)]
    settings = replace(TUNE, lora_last_blocks=2)
    model = build(CFG)
    lora.put_on(model, settings)
    lora.draw(model, TrainConfig.seed)
    write(tmp_path / "drawn", model, settings)
    peft.import_(tmp_path / "drawn", tmp_path / "imported", str(base))

    for name in ("new", "imported"):
        status, message, _ = ranks(1)(train_here, [*flags, f"--run_dir={tmp_path / name}"])[0]
        assert status == 0, message
    new, imported = (curve(tmp_path / name) for name in ("new", "imported"))
    assert new == imported and new[-1][0] == 4

    peft.export(tmp_path / "imported", tmp_path / "out", str(base))
    theirs, faults = their_adapted(base, tmp_path / "out")
    ours, _, _ = load.load_for_sampling(str(tmp_path / "imported"), None, CPU)
    assert not faults
    assert difference(ours, theirs) < 1e-5 < 1e-3 < difference(build(CFG), theirs)
    flags += [f"--run_dir={tmp_path / 'imported'}", "--lora_alpha=4", "--max_steps=6"]
    status, message, _ = ranks(1)(train_here, flags)[0]
    assert status == 2 and "lora_alpha 16.0 (here 4.0)" in message


@pytest.mark.slow
def test_an_imported_run_keeps_what_it_began_from(base, sound, tiny_data, tmp_path, ranks):
    """It trains on packed rows of another length, and begins anew only from its step-0."""
    peft.import_(sound, tmp_path / "run", str(base))
    began = load.load_model(tmp_path / "run/checkpoints/step-0", CPU)
    flags = [*SIZE, *BATCH, "--lora_rank=4", f"--init_from={base}", "--device=cpu"]
    flags += ["--max_seq_len=20", "--attn_uses_sequence_id", "--keep_last=1", "--save_interval=1"]
    flags += [f"--run_dir={tmp_path / 'run'}", *flags_for(tiny_data)]

    def train(*more):
        return ranks(1)(train_here, [*flags, *more])[0]

    status, message, _ = train()
    assert status == 0, message
    steps = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert steps == {"step-0", "step-4"}
    found, _, _ = load.load_for_sampling(str(tmp_path / "run"), None, CPU)
    assert found.cfg.max_seq_len == 20 and difference(found, began) > 1e-4

    status, message, _ = train("--resume=again")
    assert status == 2 and "run began from weights that were imported" in message
    before = curve(tmp_path / "run")
    status, message, printed = train("--skip_steps=2:3")
    assert status == 0 and ", resuming from step-0" in printed, message
    assert curve(tmp_path / "run")[:2] == before[:2] and curve(tmp_path / "run") != before

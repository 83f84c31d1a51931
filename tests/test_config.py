"""Settings: defaults < files < flags. An error is one line that names source, key and fix."""

import dataclasses
import json
import math
import re
import sys
from typing import get_type_hints

import pytest
from conftest import ROOT, refusal

import config
import plan
import program
from config import SHARDING_MODES, Float, Int, MPTConfig, TrainConfig, from_dict, load, to_json
from launch import parser

FIELDS = {f.name: f for c in (MPTConfig, TrainConfig) for f in dataclasses.fields(c)}


@pytest.fixture
def write(tmp_path):
    """write(text) makes a config file and returns its path."""

    def write(text, name="my.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def both(*argv):
    """The resolved settings as one dictionary."""
    return json.loads(to_json(*load([str(a) for a in argv], MPTConfig, TrainConfig)))


def error(*argv):
    """The message with which these arguments are refused."""
    return refusal(both, *argv)


# --------------------------------------------------------------------------------------------------
# Precedence


def test_defaults_then_files_then_flags(write):
    assert both() == vars(MPTConfig()) | vars(TrainConfig())
    first = write("n_layers = 3\nd_model = 64\nlr = 0.1\n", "first.py")
    second = write("d_model = 128\nseed = 7\n", "second.py")
    settings = both("--lr=0.5", first, second, "--seed=9")  # a flag wins wherever it stands
    given = {"n_layers": 3, "d_model": 128, "lr": 0.5, "seed": 9}
    assert settings == both() | given
    assert both(second, first)["d_model"] == 64  # of two files the later one
    assert both("--seed=1", "--seed=2")["seed"] == 2  # of two flags, too


def test_an_expected_result_is_that_of_the_settings_it_was_written_for(write):
    """A file's `expect` goes when a later file or a flag changes anything."""
    demo, other = write('expect = "4.7"\nlr = 2e-3', "demo.py"), write("d_model = 64", "other.py")
    assert both(demo)["expect"] == both(demo, "--lr=1", "--expect=4.7")["expect"] == "4.7"
    assert both(demo, other)["expect"] == both(demo, "--lr=1e-3")["expect"] == ""


def test_what_is_saved_comes_back():
    flags = ["--n_layers=3", "--kv_n_heads=4", "--logit_scale=0.5", "--lr=0.1"]
    model, train = load(flags, MPTConfig, TrainConfig)
    saved = json.loads(to_json(model, train))
    assert (from_dict(MPTConfig, saved), from_dict(TrainConfig, saved)) == (model, train)


# --------------------------------------------------------------------------------------------------
# Names

FOREIGN = {
    name: ours
    for ours, names in parser.FOREIGN_NAMES.items()
    for name in names.split()
    if ours in FIELDS
}
UNKNOWN = {
    "n_layer": "did you mean 'n_layers'?",
    **{name: f"did you mean {ours!r}?" for name, ours in FOREIGN.items()},
    "weight_decay": "decoupled_weight_decay = weight_decay * lr",
    "zzzzzz": "--help",
}


def test_an_unknown_name_is_answered_with_ours(write):
    for name, answer in UNKNOWN.items():
        path = write(f"{name} = 3\n")
        for argv, where in (
            ([f"--{name}=3"], "the command line"),
            ([f"--{name}", "3"], "the command line"),
            ([path], path),
        ):
            message = error(*argv)
            assert message.startswith(f"unknown key {name!r} in {where}") and answer in message


def test_a_program_suggests_only_its_own_names():
    for cls in (Texts, MPTConfig, TrainConfig):
        names = {field.name for field in dataclasses.fields(cls)}
        for key in {*FOREIGN, "weight_decay", "tp", "pp", "alibi_bias"} - names:
            message = refusal(load, [f"--{key}=1"], cls)
            suggested = re.findall(r"did you mean '(\w+)'|(\w+)=", message)
            assert {word for words in suggested for word in words if word} <= names, key


def test_an_old_name_means_the_new_one(write):
    assert set(parser.RENAMED.values()) <= set(FIELDS) and not set(parser.RENAMED) & set(FIELDS)
    old, new = write("checkpoint_every = 2\n"), write("recompute_every = 5\n", "new.py")
    for argv, meant in {
        ("--checkpoint_every", "2"): 2,
        (old, "--recompute_every=4"): 4,  # the later one wins, whatever its name
        (new, "--checkpoint_every=2"): 2,
        (old, new): 5,
    }.items():
        assert both(*argv)["recompute_every"] == meant, argv
    assert "recompute_every must be from 1" in error("--checkpoint_every=0")
    assert "unknown key" in refusal(load, ["--checkpoint_every=2"], MPTConfig)


def test_a_setting_that_is_gone_is_refused_where_it_is_typed(write, capsys):
    """Files and saved settings of older versions are read without it."""
    assert not set(parser.REMOVED) & set(FIELDS)
    for name, why in parser.REMOVED.items():
        assert why in error(f"--{name}=5")
        assert both(write(f"{name} = 5.0\nd_model = 64\nn_heads = 2\n"))["d_model"] == 64
        from_dict(TrainConfig, {name: 5.0})
    assert capsys.readouterr().err == ""


def test_unknown_saved_settings_are_named_once(capsys):
    """A newer version or a fork may have saved them. A checkpoint's other keys are known."""

    @dataclasses.dataclass
    class Forked(MPTConfig):
        window: int = 0

    program.say_once.cache_clear()
    saved = {"d_model": 64, "n_heads": 2, "lr": 0.1, "checkpoint_every": 2}
    saved |= {"step": 5, "optimizer": "AdamW", "data_fingerprint": "f00"}
    assert from_dict(MPTConfig, saved, "m.json").d_model == 64
    assert from_dict(TrainConfig, saved, "m.json").recompute_every == 2
    assert from_dict(Forked, {"window": 8}).window == 8
    assert capsys.readouterr().err == ""

    for _ in range(2):
        assert from_dict(MPTConfig, saved | {"window": 8, "a\nb": [1]}, "m.json").d_model == 64
    said = capsys.readouterr().err
    assert said.startswith("warning: m.json") and said.count("\n") == 1
    assert "'window', 'a\\nb'" in said


# --------------------------------------------------------------------------------------------------
# Values

GOOD = [
    ("max_tokens", "1e9", 10**9),
    ("lr", "1", 1.0),
    ("kv_n_heads", "None", None),
    ("kv_n_heads", "4", 4),
    ("logit_scale", "INV_SQRT_D_MODEL", "inv_sqrt_d_model"),
    ("logit_scale", "0.25", 0.25),
    ("alibi", "YES", True),
    ("learned_pos_emb", "0", False),
    ("dataset", "123", "123"),  # text stays text
    ("run_dir", "none", "none"),
    ("run_dir", "runs/a=b", "runs/a=b"),
]


def test_a_text_is_read_as_the_type_of_its_field(write):
    """Of a flag. In a file it is text."""
    for key, text, value in GOOD:
        found = both(f"--{key}={text}")[key]
        assert found == value and type(found) is type(value), (key, text)
        if not isinstance(value, str):
            assert "expected" in error(write(f"{key} = {text!r}"))
    assert type(both(write("max_tokens = 1e9\n"))["max_tokens"]) is int  # a whole float may serve


def test_a_path_may_begin_at_home(write, monkeypatch):
    """A shell leaves --run_dir=~/x as it is. A prompt is no path."""
    monkeypatch.setenv("HOME", "/home/me")
    for key, typed, meant in (
        ("run_dir", "~/x", "/home/me/x"),
        ("icl_tasks", "piqa,~/a.jsonl,~/b.jsonl", "piqa,/home/me/a.jsonl,/home/me/b.jsonl"),
        ("resume", "runs/~/x", "runs/~/x"),
        ("expect", "~/x", "~/x"),
    ):
        assert both(f"--{key}={typed}")[key] == both(write(f"{key} = {typed!r}"))[key] == meant
    flags = ["--prompt=~/x", "--adapter=~/a", "--adapter=b"]
    assert load(flags, Texts) == [Texts(prompt=["~/x"], adapter=["/home/me/a", "b"])]


def test_a_value_may_stand_behind_a_space_and_a_bool_needs_none(write):
    path = write("d_model = 64\nn_heads = 2")
    settings = both(
        "--alibi", path, "--lr", "1e-3", "--compile", "--run_dir", "-x", "--kv_n_heads", "1"
    )
    given = {"alibi": True, "d_model": 64, "lr": 1e-3, "compile": True, "run_dir": "-x"}
    assert {key: settings[key] for key in given} == given
    for argv in (["--n_layers"], ["--n_layers", "--alibi"]):
        message = error(*argv)
        assert message == "--n_layers needs a value: --n_layers=... (a whole number)"


BAD_VALUES = {
    "--n_layers=2.5": "a whole number",
    "--n_layers=inf": "a whole number",
    "--lr=": "a number",
    "--alibi=perhaps": "true or false",
    "--kv_n_heads=all": "a whole number or none",
    "--attn_impl=flash": "one of: auto, reference, blocks, sdpa, flex, triton",
    "--logit_scale=sqrt": "a number or one of: inv_sqrt_d_model or none",
    "n_layers = True": "a whole number",
    "lr = True": "a number",
    "alibi = 1": "true or false",
    "run_dir = None": "text",
    "mix = ['a', 1]": "text",
    "schedule = 3": "one of: cosine, constant, inv_sqrt",
}


def test_a_value_of_the_wrong_type(write):
    for given, wanted in BAD_VALUES.items():
        key, value = re.fullmatch(r"-*(\w+) ?= ?(.*)", given).groups()
        if given.startswith("-"):
            message = error(given)
            assert message.startswith(f"{key} in the command line is ") and value in message
            assert message.endswith(f", expected {wanted}")
        else:
            path = write(given)
            assert error(path) == f"{key} in {path} is {value}, expected {wanted}"


CONTRADICTIONS = {
    "--d_model=100 --n_heads=16": "d_model 100 is not a multiple of n_heads 16",
    "--kv_n_heads=3": "n_heads 16 is not a multiple of kv_n_heads 3",
    "--rope --alibi": "rope and alibi",
    "--qk_ln --qk_gn": "both norm q and k",
    "--attn_impl=sdpa --attn_logit_softcapping=30": "use auto",
    "--sliding_window_size=-2": "must be from -1",
    "--embedding_fraction=0": "must be from 1e-06 to 1",
    "--ffn_act_fn=swish": "expected one of: gelu, silu, relu",
    "--hidden_act=silu": "did you mean 'ffn_act_fn'?",
    "--sliding_window=8": "did you mean 'sliding_window_size'?",
    "--rope --d_model=9 --n_heads=3": "head dim 3 is odd",
    "--attn_impl=flex --attn_pdrop=0.1": "set attn_pdrop=0",
    "--attn_impl=triton --n_heads=8": "head dims up to 128, not 256",
    "--d_model=10 --n_heads=1 --expansion_ratio=0.01": "no hidden width",
    "--d_model=1e6 --n_layers=9999": "expected at most 1e+13",
    "--n_layers=0": "n_layers must be from 1 to 10,000, not 0",
    "--max_steps=100": "warmup_steps 100 must be below max_steps 100",
    "--icl_interval=5": "icl_interval needs tasks",
    "--lora_rank=8": "set --init_from=runs/NAME",
    "--lora_alpha=8": "lora_alpha sets nothing without adapters",
    "--packing=False": "packing sets nothing for plain text",
    "--track=wandb,mlfow": "did you mean 'mlflow'?",
    "--run_dir=": "run_dir is empty",
    "--skip_steps=5:2": "ranges such as 120:140",
    # The layers of other people's models.
    "--lora_targets=q_proj": "did you mean 'Wqkv'?",
    "--lora_targets=all-linear": "did you mean 'all'?",
    "--lora_targets=gate_up_proj": "did you mean 'up_proj'?",
}


def test_values_that_do_not_go_together():
    for flags, message in CONTRADICTIONS.items():
        assert message in error(*flags.split(" ")), flags


def test_a_number_is_finite_and_in_its_range():
    """In flags and in saved settings, of every number."""
    for cls in (MPTConfig, TrainConfig):
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if not {int, float} & set(parser.members_of(get_type_hints(cls)[name])):
                continue
            low, high = parser.range_of(hint)
            assert high < sys.float_info.max, f"{name} has no range"
            for value in (low, high):
                parser.check_ranges(dataclasses.replace(cls(), **{name: value}))
            refused = f"{name} must be from ", f"{name} in "
            for value in (math.nan, math.inf, low - 1, 2 * high):
                assert error(f"--{name}={value}").startswith(refused), (name, value)
                assert refusal(from_dict, cls, {name: value}).startswith(refused), (name, value)


def test_a_setting_of_a_fork_needs_no_range():
    """But it must be finite. A default may lie outside of its range."""

    @dataclasses.dataclass
    class Forked:
        dropout_of_layers: float = 0.0
        share: Float[0, 0.5] = 0.1
        heads: Int[1, 8] | None = 0

    assert load(["--dropout_of_layers=-1e9", "--heads=0"], Forked) == [Forked(-1e9)]
    assert "expected a number" in refusal(load, ["--dropout_of_layers=nan"], Forked)
    assert refusal(load, ["--heads=9"], Forked) == "heads must be from 1 to 8, not 9"
    assert refusal(load, ["--share=1"], Forked) == "share must be from 0 to 0.5, not 1.0"


def test_what_is_saved_is_checked_as_well():
    for values, message in [
        ({"alibi": [1]}, "alibi in m.json is [1], expected true or false"),
        ({"norm_type": {}}, "norm_type in m.json is {}, expected one of: low_precision_"),
        ({"n_heads": 3}, "d_model 2048 is not a multiple of n_heads 3 (in m.json)"),
    ]:
        assert refusal(from_dict, MPTConfig, values, "m.json").startswith(message)


def test_a_sharding_mode_says_how_many_ranks_share_the_weights():
    ranks = {m: TrainConfig(sharding=m).shard_ranks(16, node=8) for m in SHARDING_MODES}
    assert ranks == dict.fromkeys(SHARDING_MODES, 16) | {"HYBRID_SHARD": 8, "DDP": 1}
    assert TrainConfig(sharding="HYBRID_SHARD", shard_size=4).shard_ranks(16, node=8) == 4


# --------------------------------------------------------------------------------------------------
# Config files


def test_a_file_may_compute_and_import_and_its_helpers_are_its_own(write):
    path = write("import math\n_gpus = 2 ** 3\nglobal_batch_size = 16 * _gpus")
    assert both(path)["global_batch_size"] == 128


def test_a_line_that_sets_nothing(write):
    """Such as an annotation, which is what YAML looks like to Python."""
    for line in ("d_model: 64", '{"d_model": 64}', "d_model == 64"):
        path = write(f'"""A docstring is fine."""\nd_model = 128\nprint("so is this")\n{line}\n')
        message = error(path)
        assert message.startswith(f"{path}, line 4: ") and "sets nothing, write " in message
    assert both(write("d_model: int = 64\nn_heads = 2\n"))["d_model"] == 64


def test_a_file_that_does_not_run_is_named(write):
    fails = {
        "exit()": "",
        "n_layers = 1 // 0": "ZeroDivisionError",
        "n_layers = = 1": "SyntaxError",
    }
    for line, reason in fails.items():
        path = write(f"{line}\n")
        assert error(path).startswith(f"{path} does not run: {reason}"), line
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C stays Ctrl-C
        both(write("raise KeyboardInterrupt\n"))


def test_a_file_that_is_not_there(write, tmp_path, monkeypatch):
    similar = write("", "mpt1b.py")
    message = error(str(tmp_path / "mpt1bb.py"))
    assert "--key=value" in message and f"did you mean {similar}?" in message
    assert error("3").startswith("no config file '3'")  # from `--n_layers 3`
    assert "did you mean" not in error(str(tmp_path / "nowhere" / "x.py"))
    monkeypatch.chdir(ROOT)
    assert error("mpt7b.py").endswith("did you mean configs/mpt7b.py?")


# --------------------------------------------------------------------------------------------------
# Programs with settings of their own


@dataclasses.dataclass
class Texts:
    """Texts to write."""

    prompt: list[str] = dataclasses.field(default_factory=list)  # how the text begins
    adapter: list[str] = dataclasses.field(default_factory=list)  # paths
    n: int = 3  # tokens
    quiet: bool = False  # say nothing


def test_a_program_may_take_something_else_than_config_files():
    argv = ["--n", "5", "runs/a", "--quiet", "--prompt", "def main(", "runs/b", "--prompt", "-x"]
    words, texts = load(argv, Texts, takes="RUN ...")
    assert words == ["runs/a", "runs/b"]
    assert texts == Texts(prompt=["def main(", "-x"], n=5, quiet=True)
    for argv in ([], ["a", "b"]):
        message = refusal(load, argv, Texts, takes="RUN")
        assert message.startswith("usage: python ") and " RUN [--key=value ...]" in message


def test_an_address_is_refused_where_a_path_belongs(write):
    """In every text that may be a path, also in lists; and in arguments."""
    for cls in (TrainConfig, plan.PlanArgs, Texts):
        for name, hint in get_type_hints(cls).items():
            if hint in (str, list[str]) and name not in (*parser.PROSE, *parser.ADDRESSES):
                for address in ("s3://bucket/x", "a.txt,gs://bucket/x", "https://host/x"):
                    message = refusal(load, [f"--{name}={address}"], cls)
                    assert f"{name} has '{address}'" in message
                    assert "--remote" in message and "--data_dir" in message
    assert "run_dir has" in refusal(load, [write("run_dir = 's3://bucket/x'")], TrainConfig)
    assert "mix has" in refusal(load, ["--mix=a 0.5 b", "--mix=c 0.5 s3://bucket/c"], TrainConfig)
    _, cfg = load(["--remote=s3://b/x", "--data_dir=gs://b/y"], MPTConfig, TrainConfig)
    assert (cfg.remote, cfg.data_dir) == ("s3://b/x", "gs://b/y")
    assert load(["--prompt=see https://x/y"], Texts) == [Texts(prompt=["see https://x/y"])]
    assert "'s3://b/x', an address" in refusal(load, ["s3://b/x"], Texts, takes="RUN")


def test_a_list_grows_with_each_flag(write):
    flags = ["--prompt=a", "--n=2", "--prompt=", "--prompt=x=y, none", "--prompt=1"]
    assert load(flags, Texts)[0] == Texts(prompt=["a", "", "x=y, none", "1"], n=2)
    assert load([], Texts)[0].prompt == [] and Texts().prompt is not Texts().prompt
    path = write("prompt = ['a', 'b']")
    assert load([path], Texts)[0].prompt == ["a", "b"]
    assert load([path, "--prompt=c"], Texts)[0].prompt == ["c"]


def test_help_lists_every_field_with_its_default_and_comment(capsys):
    with pytest.raises(SystemExit):
        config.main(["--help"])
    text = capsys.readouterr().out
    source = (ROOT / "config.py").read_text()
    for name, field in FIELDS.items():
        (comment,) = re.findall(rf"^    {name}: .*?  # (.*)$", source, re.MULTILINE)
        default = field.default if field.default is not dataclasses.MISSING else ""  # of a list
        line = rf"^  --{name}={re.escape(str(default))} +{re.escape(comment)}$"
        assert re.search(line, text, re.MULTILINE), name
    assert "[one of: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, ZERO1, DDP]" in text
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    assert "\n  --machine= " in capsys.readouterr().out  # PlanArgs inherits it

"""config.py: defaults < files < flags, and a mistake is one line that names the source, the key and the fix."""

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import config
from config import (
    RANGES,
    SHARDING_MODES,
    MPTConfig,
    Sharding,
    TrainConfig,
    UserError,
    alternatives,
    check_ranges,
    from_dict,
    load,
    to_json,
)

ROOT = Path(__file__).parent.parent
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
    """The message of the UserError that these arguments raise; always one line."""
    with pytest.raises(UserError) as caught:
        both(*argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def run(*argv, **options):
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=120, **options
    )


# --- what wins


def test_defaults_then_files_then_flags(write):
    first = write("n_layers = 3\nd_model = 64\nlr = 0.1\n", "first.py")
    second = write("d_model = 128\nseed = 7\n", "second.py")
    settings = both("--lr=0.5", first, second, "--seed=9")  # a flag wins wherever it stands
    assert (settings["n_layers"], settings["d_model"], settings["lr"], settings["seed"]) == (
        3,
        128,
        0.5,
        9,
    )
    assert both(second, first)["d_model"] == 64  # of two files the later one
    assert both("--seed=1", "--seed=2")["seed"] == 2  # of two flags, too
    assert (
        settings["max_seq_len"] == MPTConfig.max_seq_len
        and settings["run_dir"] == TrainConfig.run_dir
    )


def test_without_arguments_the_defaults():
    assert both() == {name: field.default for name, field in FIELDS.items()}


def test_a_file_may_compute_and_import_and_its_helpers_are_its_own(write):
    path = write(
        "import math\n_gpus = 2 ** 3\nmicrobatch_size = int(math.sqrt(16))\nglobal_batch_size = 16 * _gpus\n"
    )
    assert (both(path)["microbatch_size"], both(path)["global_batch_size"]) == (4, 128)


def test_a_file_may_serve_programs_that_know_fewer_settings(write):
    (train,) = load([write("d_model = 64\nlr = 0.5\n")], TrainConfig)
    assert train.lr == 0.5


def test_names_are_unique_over_the_classes():
    assert len(FIELDS) == len(dataclasses.fields(MPTConfig)) + len(dataclasses.fields(TrainConfig))


def test_what_is_saved_comes_back():
    model, train = load(
        ["--n_layers=3", "--kv_n_heads=4", "--logit_scale=0.5", "--lr=0.1"], MPTConfig, TrainConfig
    )
    saved = json.loads(to_json(model, train))
    assert (from_dict(MPTConfig, saved), from_dict(TrainConfig, saved)) == (model, train)


# --- unknown names


@pytest.mark.parametrize(
    "theirs, ours",
    {
        "n_layer": "n_layers",
        "d_modle": "d_model",
        "block_size": "max_seq_len",
        "n_embd": "d_model",
        "learning_rate": "lr",
        "max_iters": "max_steps",
        "out_dir": "run_dir",
        "save_folder": "run_dir",
        "device_train_microbatch_size": "microbatch_size",
    }.items(),
)
def test_an_unknown_name_is_answered_with_ours(theirs, ours, write):
    assert (
        error(f"--{theirs}=3")
        == f"unknown key {theirs!r} in the command line, did you mean {ours!r}?"
    )
    path = write(f"{theirs} = 3\n")
    assert error(path) == f"unknown key {theirs!r} in {path}, did you mean {ours!r}?"


def test_a_name_like_none_of_ours():
    assert (
        error("--zzzzzz=1") == "unknown key 'zzzzzz' in the command line, see --help for the names"
    )


@pytest.mark.parametrize(
    "file, flags, same",
    [
        ("", ["--lr=2e-4", "--weight_decay=0.1"], "2e-05"),
        ("", ["--weight_decay=0.1", "--lr=2e-4"], "2e-05"),
        ("", ["--weight_decay=0.1"], "6e-05"),  # at the default lr
        ("lr = 2e-4\n", ["--weight_decay=0.1"], "2e-05"),
        ("lr = 2e-4\nweight_decay = 0.1\n", [], "2e-05"),
        ("weight_decay = 0.1\nlr = 2e-4\n", [], "2e-05"),
        ("weight_decay = 0.1\n", ["--lr=2e-4"], "2e-05"),
    ],
)
def test_weight_decay_is_answered_with_the_same_decay_here(file, flags, same, write):
    """PyTorch: p *= 1 - lr_t * weight_decay. Here: p *= 1 - (lr_t / lr) * decoupled_weight_decay."""
    message = error(write(file), *flags)
    assert message.startswith("unknown key 'weight_decay' in ")
    assert message.endswith(f"decoupled_weight_decay={same}")


# --- names of before


@pytest.fixture
def notes(capsys):
    """notes() is what went to standard error since it was last called."""
    config.say_once.cache_clear()
    return lambda: capsys.readouterr().err


def test_every_renamed_setting_has_one_name_today():
    assert set(config.RENAMED.values()) <= set(FIELDS) and not set(config.RENAMED) & set(FIELDS)


def test_an_old_name_on_the_command_line_works_and_is_told_once(notes):
    assert both("--checkpoint_every=2")["recompute_every"] == 2
    assert notes() == "note: checkpoint_every in the command line is called recompute_every now\n"
    assert both("--checkpoint_every=3")["recompute_every"] == 3 and notes() == ""


def test_an_old_name_in_a_file_works_and_is_told_once(notes, write):
    path = write("checkpoint_every = 2\n")
    assert both(path)["recompute_every"] == both(path)["recompute_every"] == 2
    assert notes() == f"note: checkpoint_every in {path} is called recompute_every now\n"
    assert both(path, "--recompute_every=4")["recompute_every"] == 4  # a flag wins as ever
    assert both(path, write("recompute_every = 5\n", "later.py"))["recompute_every"] == 5


def test_only_rank_0_tells_of_an_old_name(notes, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert both("--checkpoint_every=2")["recompute_every"] == 2 and notes() == ""


def test_an_old_name_is_checked_as_the_new_one(write):
    assert error("--checkpoint_every=0") == "recompute_every must be from 1 to 10,000, not 0"
    path = write("checkpoint_every = 'all'\n")
    assert error(path) == f"recompute_every in {path} is 'all', expected a whole number"


def test_old_and_new_name_together_are_an_error(write):
    words = "sets checkpoint_every and recompute_every, its new name: leave out checkpoint_every"
    assert error("--recompute_every=2", "--checkpoint_every=2") == f"the command line {words}"
    path = write("recompute_every = 2\ncheckpoint_every = 2\n")
    assert error(path) == f"{path} {words}"
    with pytest.raises(UserError, match=f"^m.json {words}$"):
        from_dict(TrainConfig, {"recompute_every": 2, "checkpoint_every": 2}, "m.json")


def test_a_program_without_the_setting_reads_the_file_and_refuses_the_flag(write):
    path = write("checkpoint_every = 2\nd_model = 64\nn_heads = 2\n")
    assert load([path], MPTConfig)[0].d_model == 64
    with pytest.raises(UserError, match="^unknown key 'checkpoint_every' in the command line"):
        load(["--checkpoint_every=2"], MPTConfig)


def test_what_was_saved_under_an_old_name_comes_back(notes):
    assert from_dict(TrainConfig, {"checkpoint_every": 2}).recompute_every == 2
    assert from_dict(MPTConfig, {"checkpoint_every": 2}) == MPTConfig() and notes() == ""


def test_saved_settings_that_nobody_knows_are_named_once(notes):
    """As a newer version or a fork writes them. What checkpoints hold besides is known."""
    saved = {"d_model": 64, "n_heads": 2, "lr": 0.1}
    saved |= {"step": 5, "optimizer": "AdamW", "data_fingerprint": "f00"}
    assert from_dict(MPTConfig, saved, "m.json").d_model == 64 and notes() == ""
    for _ in range(2):
        assert from_dict(MPTConfig, saved | {"window": 8, "a\nb": [1]}, "m.json").d_model == 64
    assert notes() == (
        "warning: m.json has settings that are unknown here and left out: 'window', 'a\\nb'. "
        "If they decide what the model computes, it is another model here\n"
    )


def test_the_settings_of_a_fork_are_no_strangers_to_it(notes):
    @dataclasses.dataclass
    class Forked(MPTConfig):
        window: int = 0

    assert from_dict(Forked, {"window": 8}).window == 8 and notes() == ""


# --- values

GOOD = [
    ("max_tokens", "1e9", 10**9),
    ("n_layers", "2.0", 2),
    ("lr", "1", 1.0),
    ("kv_n_heads", "none", None),
    ("kv_n_heads", "None", None),
    ("kv_n_heads", "4", 4),
    ("clip_qkv", "6", 6.0),
    ("logit_scale", "INV_SQRT_D_MODEL", "inv_sqrt_d_model"),
    ("logit_scale", "0.25", 0.25),
    ("peak_tflops", "Measure", "measure"),
    ("sharding", "full_shard", "FULL_SHARD"),
    ("precision", "BF16", "bf16"),
    ("alibi", "true", True),
    ("alibi", "YES", True),
    ("alibi", "1", True),
    ("learned_pos_emb", "false", False),
    ("learned_pos_emb", "0", False),
    ("learned_pos_emb", "no", False),
    ("dataset", "123", "123"),  # text stays text
    ("run_dir", "none", "none"),
    ("run_dir", "runs/a=b", "runs/a=b"),
]


@pytest.mark.parametrize("key, text, value", GOOD, ids=[f"{k}={t}" for k, t, _ in GOOD])
def test_a_flag_is_read_as_the_type_of_its_field(key, text, value):
    found = both(f"--{key}={text}")[key]
    assert found == value and type(found) is type(value)


def test_a_bool_flag_needs_no_value_and_others_do():
    assert both("--alibi")["alibi"] is True
    assert error("--n_layers") == "--n_layers wants a value: --n_layers=... (a whole number)"


BAD_FLAGS = [
    ("n_layers", "two", "a whole number"),
    ("n_layers", "2.5", "a whole number"),
    ("n_layers", "inf", "a whole number"),
    ("n_layers", "none", "a whole number"),
    ("lr", "fast", "a number"),
    ("lr", "", "a number"),
    ("alibi", "perhaps", "true or false"),
    ("kv_n_heads", "all", "a whole number or none"),
    ("attn_impl", "flash", "one of: auto, reference, blocks, sdpa, flex"),
    ("logit_scale", "sqrt", "a number or one of: inv_sqrt_d_model or none"),
]


@pytest.mark.parametrize("key, text, wanted", BAD_FLAGS, ids=[f"{k}={t}" for k, t, _ in BAD_FLAGS])
def test_a_flag_of_the_wrong_type(key, text, wanted):
    message = error(f"--{key}={text}")
    assert re.fullmatch(
        rf"{key} in the command line is .*, expected {re.escape(wanted)}.*", message
    )


BAD_VALUES = [
    ("n_layers", "'3'", "a whole number"),
    ("n_layers", "True", "a whole number"),
    ("lr", "'1e-4'", "a number"),
    ("lr", "True", "a number"),
    ("alibi", "1", "true or false"),
    ("run_dir", "5", "text"),
    ("run_dir", "None", "text"),
    ("schedule", "'linear'", "one of: cosine, constant, inv_sqrt"),
    ("schedule", "3", "one of: cosine, constant, inv_sqrt"),
]


@pytest.mark.parametrize(
    "key, value, wanted", BAD_VALUES, ids=[f"{k}={v}" for k, v, _ in BAD_VALUES]
)
def test_a_value_of_the_wrong_type_in_a_file(key, value, wanted, write):
    path = write(f"{key} = {value}\n")
    assert error(path) == f"{key} in {path} is {value}, expected {wanted}"


@pytest.mark.parametrize("value, kept", [("1e9", 10**9), ("2", 2)])
def test_a_whole_float_in_a_file_serves_as_an_int(value, kept, write):
    found = both(write(f"max_tokens = {value}\n"))["max_tokens"]
    assert found == kept and type(found) is int


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--d_model=100", "--n_heads=16"], "d_model 100 is not a multiple of n_heads 16"),
        (["--kv_n_heads=3"], "n_heads 16 is not a multiple of kv_n_heads 3"),
        (["--n_layers=0"], "n_layers must be from 1 to 10,000, not 0"),
        (["--resid_pdrop=1"], "resid_pdrop must be from 0 to 0.99, not 1.0"),
        (["--max_steps=50"], "warmup_steps 100 must be below max_steps 50"),
        (["--val_fraction=1"], "val_fraction must be from 1e-09 to 0.5, not 1.0"),
        (["--lr=nan"], "lr in the command line is nan, expected a number"),
        (["--grad_clip=-1"], "grad_clip must be from 0 to 1,000,000, not -1.0"),
        (["--global_batch_size=0"], "global_batch_size must be from 1 to 1,000,000, not 0"),
        (
            ["--d_model=10", "--n_heads=1", "--expansion_ratio=0.01"],
            "expansion_ratio 0.01 leaves no hidden width",
        ),
        (
            ["--d_model=1e6", "--n_layers=9999"],
            "the model has 1e+17 parameters, expected at most 1e+13",
        ),
        (["--run_dir="], "run_dir is '', expected the name of a folder, such as runs/NAME"),
        (["--run_dir= "], "run_dir is ' ', expected the name of a folder, such as runs/NAME"),
        (
            ["--run_dir=a\0b"],
            r"run_dir is 'a\x00b', expected the name of a folder, such as runs/NAME",
        ),
        (
            [f"--run_dir={__file__}"],
            f"run_dir {__file__} is there and no folder: set another --run_dir",
        ),
        (
            ["--run_dir=/dev/null"],
            "run_dir /dev/null is there and no folder: set another --run_dir",
        ),
    ],
)
def test_values_that_do_not_go_together(flags, message):
    assert error(*flags) == message


NUMBERS = {
    name: hint
    for c in (MPTConfig, TrainConfig)
    for name, hint in get_type_hints(c).items()
    if set(alternatives(hint)) & {int, float}
}
HUGE = "9" * 5000


def test_every_number_has_a_range_and_a_default_within():
    assert set(NUMBERS) == set(RANGES)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_finite_and_in_its_range(name, write):
    """In flags, in files, in what was saved; at once, however large it is."""
    low, high = RANGES[name]
    for text in (
        "nan",
        "inf",
        "-inf",
        "1e400",
        "1e300",
        "-1e300",
        str(low - 1),
        str(2 * high),
        HUGE,
        f"-{HUGE}",
        "9" * 400,
    ):
        assert error(f"--{name}={text}").startswith(
            (f"{name} must be from ", f"{name} in the command line is ")
        )
    path = write(f"{name} = 10 ** 5000\n")
    assert error(path).startswith(
        (f"{name} must be from ", f"{name} in {path} is a number of 5000 digits, expected")
    )
    for value in (math.nan, math.inf, -math.inf, low - 1, 2 * high, 10**5000):
        cls = MPTConfig if name in get_type_hints(MPTConfig) else TrainConfig
        with pytest.raises(UserError, match=f"^{name} must be from"):
            cls(**{name: value}).check()
        with pytest.raises(UserError, match=f"^{name} (must be from|in x/meta.json is) "):
            from_dict(cls, {name: value}, "x/meta.json")


def test_a_number_that_a_forker_adds_needs_no_range_but_must_be_finite():
    check_ranges(types.SimpleNamespace(dropout_of_layers=-1e9))
    with pytest.raises(UserError, match="dropout_of_layers must be from .*, not nan"):
        check_ranges(types.SimpleNamespace(dropout_of_layers=math.nan))


@pytest.mark.parametrize("name", NUMBERS)
def test_the_ends_of_a_range_belong_to_it(name):
    for value in RANGES[name]:
        others = vars(MPTConfig()) | vars(TrainConfig()) | {name: value}
        check_ranges(types.SimpleNamespace(**others))


def test_what_is_saved_is_checked_as_well():
    for values, message in [
        ({"d_model": "64"}, "d_model in m.json is '64', expected a whole number"),
        ({"d_model": None}, "d_model in m.json is None, expected a whole number"),
        ({"alibi": [1]}, "alibi in m.json is [1], expected true or false"),
        (
            {"attn_impl": {}},
            "attn_impl in m.json is {}, expected one of: auto, reference, blocks, sdpa, flex, triton",
        ),
        ({"n_heads": 3}, "d_model 2048 is not a multiple of n_heads 3"),
    ]:
        with pytest.raises(UserError) as caught:
            from_dict(MPTConfig, values, "m.json")
        assert str(caught.value) == message


# --- files


def test_a_file_that_looks_like_yaml(write):
    """To Python `d_model: 64` is an annotation, which sets nothing."""
    path = write("# our model\nd_model: 64\nalibi: true\n", "my.yaml")
    assert error(path) == f"{path}, line 2: 'd_model: 64' sets nothing, write d_model = 64"
    path = write("d_model: int\n")
    assert error(path) == f"{path}, line 1: 'd_model: int' sets nothing, write d_model = int"
    assert both(write("d_model: int = 64\nn_heads = 2\n"))["d_model"] == 64


@pytest.mark.parametrize("line", ['{"d_model": 64}', "d_model == 64", "d_model, 64", "-5"])
def test_lines_that_set_nothing(line, write):
    path = write(f'"""A docstring is fine."""\nd_model = 128\nprint("so is this")\n{line}\n')
    assert re.fullmatch(rf"{path}, line 4: .* sets nothing, write key = value", error(path))


@pytest.mark.parametrize(
    "line", ["import sys; sys.exit(3)", "raise SystemExit", "exit()", "raise GeneratorExit"]
)
def test_a_file_that_exits_is_named(line, write):
    path = write(f"{line}\n")
    assert error(path).startswith(f"{path} does not run: ")


def test_control_c_in_a_file_is_control_c(write):
    with pytest.raises(KeyboardInterrupt):
        both(write("raise KeyboardInterrupt\n"))


def test_a_file_that_loops_is_named(write):
    """In a real process, which Ctrl-C ends."""
    path = write("while True:\n    pass\n")
    program = "import config; config.PATIENCE = 0.1; config.run(lambda argv: config.load(argv, config.TrainConfig))"
    looping = subprocess.Popen(
        [sys.executable, "-c", program, path], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert (
        looping.stderr.readline()
        == f"{path} is still running after 0.1 s: if it does not end, press Ctrl-C\n"
    )
    looping.send_signal(signal.SIGINT)
    assert looping.wait(30) == 130


def test_a_file_that_raises(write):
    path = write("n_layers = 1 // 0\n")
    assert (
        error(path) == f"{path} does not run: ZeroDivisionError: integer division or modulo by zero"
    )
    path = write("n_layers = = 1\n")
    assert error(path).startswith(f"{path} does not run: SyntaxError")


def test_a_file_that_is_not_there(write, tmp_path):
    near = write("", "mpt1b.py")
    wrong = str(tmp_path / "mpt1bb.py")
    assert (
        error(wrong)
        == f"no config file {wrong!r} (flags are written --key=value), did you mean {near}?"
    )
    assert error("3").startswith(
        "no config file '3' (flags are written --key=value)"
    )  # --n_layers 3
    assert error(str(tmp_path / "nowhere" / "x.py")).endswith("(flags are written --key=value)")


def test_the_nearest_file_in_configs(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert error("mpt7b.py").endswith("did you mean configs/mpt7b.py?")


def test_every_sharding_mode_says_what_it_shards_and_when():
    assert tuple(SHARDING_MODES) == get_args(Sharding)
    ranks = [TrainConfig(sharding=mode).shard_ranks(16, node=8) for mode in SHARDING_MODES]
    assert ranks == [16, 16, 8, 16, 1]
    assert TrainConfig(sharding="HYBRID_SHARD", shard_size=4).shard_ranks(16, node=8) == 4
    late = [mode for mode, facts in SHARDING_MODES.items() if facts.reduces_late]
    assert late == ["ZERO1", "DDP"]


# --- real processes


def test_help_lists_every_field_with_its_default_and_comment():
    text = run("config.py", "--help").stdout
    source = (ROOT / "config.py").read_text()
    for name, field in FIELDS.items():
        (comment,) = re.findall(rf"^    {name}: .*?  # (.*)$", source, re.MULTILINE)
        assert re.search(
            rf"^  --{name}={re.escape(str(field.default))} +{re.escape(comment)}$",
            text,
            re.MULTILINE,
        ), name
    assert "[one of: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, ZERO1, DDP]" in text


# ---------------------------------------------------------------------------------------------------------------
# Programs that take something else than config files


@dataclasses.dataclass
class Texts:
    """Texts to write."""

    prompt: list[str] = dataclasses.field(default_factory=list)  # what to go on from
    n: int = 3  # tokens
    quiet: bool = False  # say nothing


def test_a_program_may_take_something_else_than_config_files():
    words, texts = load(["runs/a", "--n=5", "runs/b"], Texts, takes="RUN ...")
    assert words == ["runs/a", "runs/b"] and texts == Texts(n=5)
    for argv in ([], ["a", "b"]):
        with pytest.raises(
            UserError, match=r"^usage: python .* RUN \[--key=value \.\.\.\] \(--help lists"
        ):
            load(argv, Texts, takes="RUN")


def test_a_list_grows_with_each_flag():
    flags = ["--prompt=a", "--n=2", "--prompt=", "--prompt=x=y, none", "--prompt=1"]
    assert load(flags, Texts)[0] == Texts(prompt=["a", "", "x=y, none", "1"], n=2)
    assert load([], Texts)[0].prompt == [] and Texts().prompt is not Texts().prompt


def test_a_config_file_may_hold_a_list(tmp_path):
    (tmp_path / "a.py").write_text("prompt = ['a', 'b']\n")
    assert load([str(tmp_path / "a.py"), "--prompt=c"], Texts)[0].prompt == ["a", "b", "c"]
    (tmp_path / "b.py").write_text("prompt = ['a', 1]\n")
    with pytest.raises(UserError, match=r"prompt in .*b\.py is \['a', 1\], expected text"):
        load([str(tmp_path / "b.py")], Texts)


@pytest.mark.parametrize(
    "argv, meant",
    [
        (["RUN", "--prompt"], "--prompt=... (text)"),
        (["RUN", "--n", "--quiet"], "--n=... (a whole number)"),
    ],
)
def test_a_flag_without_its_value_is_answered_with_what_to_write(argv, meant):
    with pytest.raises(UserError) as error:
        load(argv, Texts, takes="RUN")
    assert str(error.value).endswith(f" wants a value: {meant}")


def test_a_value_may_stand_behind_a_space_where_no_config_files_are_taken():
    words, texts = load(
        ["--n", "5", "RUN", "--quiet", "--prompt", "def main(", "--prompt", "-x"],
        Texts,
        takes="RUN",
    )
    assert words == ["RUN"] and (texts.n, texts.prompt, texts.quiet) == (
        5,
        ["def main(", "-x"],
        True,
    )


def test_help_names_config_files_only_where_they_are_taken(capsys):
    for takes, begin in (
        ("RUN", "settings: --key=value\n"),
        (None, "settings: --key=value, or key = value in a"),
    ):
        with pytest.raises(SystemExit):
            load(["--help"], Texts, takes=takes)
        shown = capsys.readouterr().out
        assert begin in shown and re.search(r"--prompt= +what to go on from\n", shown)


# ---------------------------------------------------------------------------------------------------------------


def test_a_mistake_is_one_line_and_exit_status_2():
    result = run("config.py", "--n_layer=3")
    assert result.returncode == 2 and result.stdout == ""
    assert (
        result.stderr
        == "error: unknown key 'n_layer' in the command line, did you mean 'n_layers'?\n"
    )


def test_config_imports_no_torch():
    """A wrong flag is answered at once: importing torch takes seconds."""
    result = run("-c", "import sys, config; print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert result.stdout == "False False\n"


@pytest.mark.slow
def test_under_torchrun_it_is_said_once(torchrun):
    result = torchrun(2, "--n_layer=3")
    assert result.returncode != 0
    lines = [
        line for line in result.stderr.splitlines() if "n_layer" in line or "config.load" in line
    ]
    assert lines == ["error: unknown key 'n_layer' in the command line, did you mean 'n_layers'?"]

"""plan.py: layouts that are chosen and taken, scaling, budgets, pictures, and its speed."""

import cProfile
import json
import pstats
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest

import config
import flops
import plan
from config import MPTConfig, TrainConfig
from planning import answer, budget, memory, search
from planning.answer import PlanArgs
from program import UserError

ROOT = Path(__file__).parent.parent
MPT7B, MPT70B = (str(ROOT / f"configs/{name}.py") for name in ("mpt7b", "mpt70b"))
FIXED = "--tp=1 --pp=1 --sharding=FULL_SHARD --microbatch_size=1 --activation_checkpointing=none"


def planned(capsys, *argv) -> dict:
    """The JSON that plan.py prints for these arguments."""
    plan.main([*argv, "--json"])
    return json.loads(capsys.readouterr().out)


def assumptions(capsys, word: str, *argv) -> list[str]:
    """The assumptions of a plan that have this word."""
    return [line for line in planned(capsys, *argv)["assumed"] if word in line]


def printed(capsys, *argv) -> str:
    """The text that plan.py prints for these arguments."""
    plan.main(list(argv))
    return capsys.readouterr().out


def test_what_a_config_says_is_taken(capsys):
    found = planned(capsys, MPT7B, "--device=mi250", "--devices=64", "--network=100")
    layout = found["layout"]
    assert layout["sharding"] == "ZERO1"
    assert layout["microbatch_size"] == 8
    assert layout["activation_checkpointing"] == "full"
    assert (layout["dp"], layout["tp"], layout["pp"]) == (64, 1, 1)
    assert found["n_params"] == 6_658_859_008
    assert found["fits"]
    step = found["seconds"].pop("step")
    assert step == pytest.approx(sum(found["seconds"].values()))
    assert found["tokens_per_second"] == pytest.approx(1024 * 2048 / step)


def test_tokens_are_the_config_files_else_twenty_a_parameter(capsys):
    assert planned(capsys, MPT7B, "--device=h100")["tokens"] == 63900 * 1024 * 2048
    assert not assumptions(capsys, "tokens a parameter", MPT7B, "--device=h100")
    found = planned(capsys, "--device=h100")
    assert found["tokens"] == 20 * found["n_params"]
    assert assumptions(capsys, "20 tokens a parameter", "--device=h100")


def test_your_settings_as_they_are_stand_below_the_plan(capsys, tmp_path):
    """If the plan has another layout."""
    lines = (ROOT / "configs/mpt1b.py").read_text().splitlines()
    path = tmp_path / "left_open.py"
    path.write_text("\n".join(line for line in lines if not line.startswith("sharding")))
    flags = [str(path), "--device=mi250", "--devices=8"]
    fixed = planned(capsys, *flags, "--sharding=FULL_SHARD")
    best = planned(capsys, *flags)
    assert best["layout"]["sharding"] == "ZERO1"
    own = best["others"][-1]
    assert own["label"] == "your settings" and own["flags"] == fixed["flags"]
    assert own["tokens_per_second"] == fixed["tokens_per_second"]
    for question in ([*flags, "--sharding=FULL_SHARD"], ["--device=mi250"]):
        others = planned(capsys, *question)["others"]
        assert "your settings" not in {row["label"] for row in others}


@pytest.mark.parametrize(
    "device, words",
    [("mi250", "EXTRAPOLATED"), ("mi300x", "EXTRAPOLATED"), ("h100", "as LLM Foundry's")],
)
def test_a_device_that_was_not_measured_is_labelled(capsys, device, words):
    (line,) = assumptions(capsys, "speed", MPT7B, f"--device={device}")
    assert words in line


def test_the_network_is_an_assumption_only_between_nodes(capsys):
    mi250 = (MPT7B, "--device=mi250")
    assert not assumptions(capsys, "network", *mi250, "--devices=8")
    assert assumptions(capsys, "network", *mi250, "--devices=16")
    assert not assumptions(capsys, "network", *mi250, "--devices=16", "--network=50")


def test_a_sweep(capsys):
    flags = [MPT7B, "--device=mi250", "--network=100"]
    rows = planned(capsys, *flags, "--sweep_devices=64,8,256")
    strong, weak = rows[:3], rows[3:]
    for name, own in (("strong scaling", strong), ("weak scaling", weak)):
        assert [(row["label"], row["devices"]) for row in own] == [(name, n) for n in (8, 64, 256)]
        for row in own:
            ratio = row["tokens_per_second"] / own[0]["tokens_per_second"]
            assert row["efficiency"] == pytest.approx(ratio * 8 / row["devices"])
    assert {row["layout"]["global_batch_size"] for row in strong} == {1024}
    for row in weak:
        assert row["layout"]["global_batch_size"] == 1024 * row["devices"] // 8
    alone = planned(capsys, *flags, "--devices=64")
    assert alone["tokens_per_second"] == strong[1]["tokens_per_second"]


@pytest.mark.parametrize(
    "device, n, days",
    [
        ("h100", 64, 7),
        ("4090", 1, 0.3),
        pytest.param("mi300x", 24, 2, marks=pytest.mark.slow),
        pytest.param("mi250x", 1024, 30, marks=pytest.mark.slow),
    ],
)
def test_a_budget_is_used_up(capsys, device, n, days):
    """By the compute-optimal model, and by one half as large that sees more tokens."""
    found = planned(capsys, f"--device={device}", f"--devices={n}", f"--budget={days}")
    optimal, smaller = found
    assert 20 <= optimal["tokens"] / optimal["n_params"] < 24
    assert 0.4 < smaller["n_params"] / optimal["n_params"] <= 0.5
    assert smaller["tokens_per_parameter"] > 3 * optimal["tokens_per_parameter"]
    for training in found:
        assert training["fits"]
        assert 0.99 * days < training["days"] <= days
        n_params, tokens = training["n_params"], training["tokens"]
        loss = 1.69 + 406.4 / n_params**0.34 + 410.7 / tokens**0.28
        assert training["predicted_loss"] == pytest.approx(loss)


def test_a_budgets_flags_train_its_models(capsys):
    """As a plan of their own."""
    fleet = ["--device=h100", "--devices=8"]
    for row in planned(capsys, *fleet, "--budget=1"):
        launch = [*row["model"].split(), *row["flags"].split(), f"--max_steps={row['max_steps']}"]
        again = planned(capsys, *fleet, *launch)
        assert again["days"] == pytest.approx(row["days"])
        assert again["n_params"] == row["n_params"]


def test_a_budgets_flags_keep_what_the_user_set_of_the_model(capsys):
    """All but its shape, which the budget finds."""
    own = "--vocab_size=32000 --expansion_ratio=3 --alibi --no_bias --max_seq_len=1024 --qk_ln"
    (expected,) = config.load(own.split(), MPTConfig)
    for row in planned(capsys, "--device=h100", "--devices=8", "--budget=1", *own.split()):
        (m,) = config.load(row["model"].split(), MPTConfig)
        shape = {name: getattr(m, name) for name in budget.SHAPE}
        assert m == replace(expected, **shape)
        assert flops.n_params(m) == row["n_params"]


ON_FRONTIER = f"{ROOT}/configs/frontier_175b.py --choose --device=mi250x --devices=1024"


def test_the_next_fastest_stand_below_the_plan(capsys):
    """They differ in tp, pp or sharding; each has flags, which as a plan give the same speed."""
    question = [MPT7B, "--device=h100", "--devices=16", "--choose"]
    found = planned(capsys, *question)
    rows = [found, *[row for row in found["others"] if row["label"] == "next"]]
    rates = [row["tokens_per_second"] for row in rows]
    assert len(rows) == 5 and rates == sorted(rates, reverse=True)
    layouts = [row["layout"] for row in rows]
    assert len({(layout["tp"], layout["pp"], layout["sharding"]) for layout in layouts}) == 5
    for row in rows:
        again = planned(capsys, *question, *row["flags"].split())
        assert again["tokens_per_second"] == row["tokens_per_second"]


@pytest.mark.slow
def test_a_choice_takes_a_few_seconds():
    """Counted in calls of functions, 3 million a second: other work on a machine changes none."""
    with cProfile.Profile() as profile:
        plan.main(ON_FRONTIER.split())
    assert pstats.Stats(profile).total_calls < 8_000_000


@pytest.mark.parametrize(
    "lines, flags, expected",
    [
        ("", "--devices=16 --choose --sharding=HYBRID_SHARD", "HYBRID_SHARD --shard_size=8"),
        ("tp = 4\nsequence_parallel = True", "--devices=16", "--tp=4 --sequence_parallel=True"),
        ("tp = 4\nsequence_parallel = True", "--devices=16 --tp=1", "--tp=1 --pp=1"),
        ("pp = 5", "--devices=40 --tp=1", "--pp=5"),  # 32 layers: uneven stages
    ],
)
def test_the_flags_of_a_plan_launch_it(capsys, tmp_path, lines, flags, expected):
    """What a config file sets is kept: sequence parallelism where there are tensor ranks."""
    path = tmp_path / "own.py"
    path.write_text(f"{Path(MPT7B).read_text()}{lines}\n")
    found = planned(capsys, str(path), "--device=mi250", *flags.split())
    assert expected in found["flags"]
    assert ("sequence_parallel" in found["flags"]) == (found["layout"]["tp"] > 1)
    _, cfg = config.load([MPT7B, *found["flags"].split()], MPTConfig, TrainConfig)
    assert {name: getattr(cfg, name) for name in answer.LAYOUT}.items() <= found["layout"].items()


def test_a_model_too_small_for_its_device_says_what_is_not_in_the_model(capsys):
    demo = [f"{ROOT}/configs/demo.py", "--device=h100", "--devices=1"]
    assert assumptions(capsys, "to start, longer than they run", *demo)
    found = planned(capsys, *demo)
    assert found["band"]["tokens_per_second"][0] < 0.2 * found["tokens_per_second"]
    assert not assumptions(capsys, "longer than they run", MPT7B, "--device=h100")


def test_kernels_of_today(capsys):
    """Each flag makes its part of the step faster: as LLM Foundry's of 2023 they are slower."""
    base = [MPT7B, "--device=h100", *FIXED.split()]
    plain = planned(capsys, *base)["seconds"]
    quick = planned(capsys, *base, "--attention_efficiency=0.36", "--bandwidth=6700")["seconds"]
    assert plain["attention"] / quick["attention"] == pytest.approx(2)
    assert plain["memory-bound"] / quick["memory-bound"] == pytest.approx(2)
    compiled = planned(capsys, *base, "--compile")["seconds"]
    assert compiled["memory-bound"] < 0.9 * plain["memory-bound"]


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--attention_efficiency=0.6", []),
        ("--attention_efficiency=0.8 --bandwidth=1e6", ["of the peak (masked scores counted)"]),
    ],
)
def test_a_speed_that_no_matmuls_reach_is_doubted(capsys, flags, words):
    layout = "--tp=1 --pp=1 --sharding=FULL_SHARD --activation_checkpointing=full".split()
    question = [MPT7B, "--device=h100", "--devices=8", "--microbatch_size=8", *layout]
    found = assumptions(capsys, "DOUBTFUL", *question, *flags.split())
    assert len(found) == len(words)
    for line, part in zip(found, words, strict=True):
        assert part in line


def test_a_bad_number_of_devices_does_not_lose_the_table(capsys):
    """Its row says why."""
    question = [MPT7B, "--device=mi250", "--pp=1"]
    strong = planned(capsys, *question, "--sweep_devices=8,7,16")[:3]
    assert "set --global_batch_size=1022 or 1029" in strong[0]["problem"]
    assert strong[1]["efficiency"] == 1
    assert strong[1:] == planned(capsys, *question, "--sweep_devices=8,16")[:2]


NUMBERS = {
    name: config.range_of(hint)
    for cls in (PlanArgs, search.LayoutArgs)
    for name, hint in get_type_hints(cls, include_extras=True).items()
    if {int, float} & set(config.members_of(config.types_of(cls)[name]))
}


@pytest.mark.parametrize("name", NUMBERS)
def test_an_absurd_number_is_refused_and_any_other_has_an_answer(capsys, name):
    """In JSON, which has no Infinity and no NaN."""
    low, high = NUMBERS[name]
    question = [MPT7B, "--device=mi250", *FIXED.split(), "--price=2", "--watts=500", "--json"]
    if name == "budget":
        question = [*question[1:], "--devices=1000000"]  # the largest models
    for number in ("1e-300", "1e300", "-1"):
        with pytest.raises(UserError, match=f"^{name} (must be from|in the command line is)"):
            plan.main([*question, f"--{name}={number}"])
    for number in (low, high):
        try:
            plan.main([*question, f"--{name}={number}"])
        except UserError:
            continue  # the model does not fit, or cannot be split so
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "question",
    [
        pytest.param("MPT70B --device=mi250 --devices=4 --choose", marks=pytest.mark.slow),
        "MPT70B --device=mi250 --devices=8 --global_batch_size=256",
        "MPT7B --device=mi250 --devices=8 --sharding=DDP --tp=1 --pp=1 --microbatch_size=auto",
        "MPT7B --device=4090 --devices=8 --microbatch_size=64",
    ],
)
def test_what_does_not_fit_says_by_how_much_and_what_would(capsys, question):
    """The fix fits, and not even the smallest layout did."""
    argv = [{"MPT7B": MPT7B, "MPT70B": MPT70B}.get(word, word) for word in question.split()]
    too_much = "GB more than the [0-9.]+ GB of room; the largest part is "
    with pytest.raises(UserError, match=too_much) as error:
        plan.main(argv)
    fix = str(error.value).partition("What would fit: ")[2]
    assert fix.startswith("--")
    assert planned(capsys, *argv, *fix.split())["fits"]


@pytest.mark.parametrize("size", [4, 32])
def test_a_layout_that_does_not_fit_names_what_would(capsys, size):
    flags = f"--tp=1 --pp=1 --sharding=FULL_SHARD --microbatch_size={size}"
    question = [MPT7B, *flags.split(), "--activation_checkpointing=none", "--device=mi250"]
    question += ["--devices=4"]
    found = planned(capsys, *question)
    assert not found["fits"] and found["would_fit"] and found["share_of_memory"] > memory.ROOM
    assert "DOES NOT FIT" in printed(capsys, *question)
    (fix,) = found["would_fit"]
    assert planned(capsys, *question, *fix.split())["fits"]
    assert planned(capsys, *question, "--memory_gb=1000")["fits"]


# The flags of a question, MPT7B for its config file, and a part of the answer.
MISTAKES = [
    ("MPT7B", "which device?"),
    ("MPT7B --device=mi520", "did you mean mi250"),
    ("--device=h100,mi520", "did you mean mi250"),
    ("MPT7B --device=v100", "no bf16 peak known for V100"),
    ("MPT7B --device=mi250 --devices=8 --tp=3", "set --devices=6 or 9"),
    ("MPT7B --device=h100 --devices=16 --tp=16", "tp 16 does not divide the 8 devices of a node"),
    ("MPT70B --device=mi250 --devices=4 --choose", "64.9B parameters do not fit 4 x MI250 GCD"),
    ("MPT7B --device=mi250 --sweep_devices=0,8", "devices must be from 1 to 1,000,000, not 0"),
    ("MPT7B --device=mi250 --sweep_devices=8,x", "expected whole numbers, such as 8,16,64"),
    ("MPT7B --device=mi250 --sweep_devices=7 --pp=1", "set --global_batch_size=1022 or 1029"),
    ("--device=mi250 --budget=0.0001", "0.0001 days on 8 x MI250 GCD are too few"),
    ("MPT7B --device=mi250 --budget=7", "--budget finds the model and its tokens: remove "),
    ("--device=mi250 --budget=7 --n_heads=8 --tokens=1e9", "remove --tokens --n_heads"),
    ("--device=mi250 --devices=61 --budget=7 --global_batch_size=256", "set --global_batch_size="),
    ("--device=mi250 --budget=7 --sweep_devices=8", "--budget and --sweep_devices are two"),
    ("--device=h100 --budget=7 --lora_rank=8", "remove --lora_rank"),
    ("--device=h100,mi250 --budget=7", "--budget plans for one kind of device"),
    ("MPT7B --device=mi250 --precision=fp32", "plans are for bf16"),
    (
        "MPT7B --device=mi250 --pp=2 --lora_rank=8 --lora_last_blocks=2",
        "the first pipeline stage would have nothing to train",
    ),
    (
        "MPT7B --device=mi250 --devices=16 --sharding=HYBRID_SHARD --shard_size=5",
        "shard_size 5 does not divide the 16 data-parallel ranks",
    ),
    ("MPT7B --plot", "which device?"),
    ("MPT7B --device=mi250 --plot --out=plan.foo", "--out=plan.foo: "),
    (
        "MPT7B --device=mi250 --plot --out=no/such/plan.png",
        "there is no folder no/such: mkdir -p no/such",
    ),
    ("MPT7B --machine=frontie", "no machine 'frontie', did you mean frontier?"),
    ("MPT7B --device=h100 --calibrate=nope.json", "name a table of `bench train` or a machine"),
    ("--device=h100,mi250 --price=1,2,3", "--price=1,2,3 has 3 values: 2 kinds of device need"),
    ("--device=h100 --price=1,2", "price in the command line is '1,2', expected a number"),
    ("MPT7B --device=h100 --tokens=1e9 --max_steps=500", "two lengths of a run: remove one"),
]


@pytest.mark.parametrize("flags, message", MISTAKES)
def test_mistakes_are_told(monkeypatch, flags, message):
    monkeypatch.chdir(ROOT)
    files = {"MPT7B": MPT7B, "MPT70B": MPT70B}
    with pytest.raises(UserError) as error:
        plan.main([files.get(flag, flag) for flag in flags.split()])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_picture_of_the_memory_of_a_plan(tmp_path):
    """Others: planning/test_picture.py."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: see requirements-extra.txt")
    out = tmp_path / "plan.png"
    plan.main([MPT7B, "--device=mi250", "--devices=16", "--plot", f"--out={out}"])
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 20_000


def test_answers_come_without_torch():
    """So in a tenth of a second: importing torch takes a second or more."""
    code = "import sys, plan; plan.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, MPT7B, "--device=mi250", "--devices=64"]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)

"""plan.py: layouts that are chosen and taken, rows and their bands, scaling, budgets, pictures."""

import cProfile
import json
import pstats
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest

import config
import flops
import plan
from config import MPTConfig, TrainConfig
from launch import parser
from planning import answer, budget, memory, picture, search
from planning.answer import PlanArgs
from program import UserError

ROOT = Path(__file__).parent.parent
MPT125M, MPT7B, MPT70B, LORA, DEMO = (
    str(ROOT / f"configs/{name}.py")
    for name in ("mpt125m", "mpt7b", "mpt70b", "lora_mpt7b", "demo")
)
FIXED = "--tp=1 --pp=1 --sharding=FULL_SHARD --microbatch_size=1 --activation_checkpointing=none"


def planned(capsys, *argv) -> dict | list[dict]:
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
    of_config, of_flags = (
        planned(capsys, *words, "--device=h100", *FIXED.split()) for words in ([MPT7B], [])
    )
    assert of_config["tokens"] == 63900 * 1024 * 2048
    assert of_flags["tokens"] == 20 * of_flags["n_params"]
    for found, n in ((of_config, 0), (of_flags, 1)):
        assert len([line for line in found["assumed"] if "20 tokens a parameter" in line]) == n


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


@pytest.mark.parametrize("device, words", [("mi250", "EXTRAPOLATED"), ("h100", "as LLM Foundry's")])
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
    table = printed(capsys, *flags, "--sweep_devices=64,8,256")
    assert f"{strong[1]['efficiency']:.1%}" in table and "cost" not in table


@pytest.mark.parametrize(
    "device, n, days",
    [
        ("4090", 1, 0.3),
        pytest.param("h100", 64, 7, marks=pytest.mark.slow),
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
    """As a plan of their own. They keep what the user set of the model, all but its shape."""
    fleet = ["--device=h100", "--devices=8"]
    own = "--vocab_size=32000 --expansion_ratio=3 --alibi --no_bias --max_seq_len=1024 --qk_ln"
    (expected,) = config.load(own.split(), MPTConfig)
    for row in planned(capsys, *fleet, "--budget=1", *own.split()):
        launch = [*row["model"].split(), *row["flags"].split(), f"--max_steps={row['max_steps']}"]
        again = planned(capsys, *fleet, *launch)
        assert again["days"] == pytest.approx(row["days"])
        (m,) = config.load(row["model"].split(), MPTConfig)
        shape = {name: getattr(m, name) for name in budget.SHAPE}
        assert m == replace(expected, **shape)
        assert flops.n_params(m) == row["n_params"] == again["n_params"]


def test_a_batch_that_is_chosen_does_not_change_the_steps(capsys):
    found = planned(capsys, "--device=h100", "--devices=96", "--max_steps=200", *FIXED.split())
    assert found["max_steps"] == 200


ON_FRONTIER = f"{ROOT}/configs/frontier_175b.py --choose --device=mi250x --devices=1024"


def test_the_next_fastest_stand_below_the_plan(capsys):
    """They differ in tp or sharding; each has flags, which as a plan give the same speed."""
    question = [MPT7B, "--device=h100", "--devices=8", "--choose", "--pp=1"]
    found = planned(capsys, *question)
    rows = [found, *[row for row in found["others"] if row["label"] == "next"]]
    rates = [row["tokens_per_second"] for row in rows]
    assert len(rows) == 5 and rates == sorted(rates, reverse=True)
    layouts = [row["layout"] for row in rows]
    assert len({(layout["tp"], layout["sharding"]) for layout in layouts}) == 5
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
    demo = [DEMO, "--device=h100", "--devices=1"]
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


def test_a_speed_that_no_matmuls_reach_is_doubted(capsys):
    layout = "--tp=1 --pp=1 --sharding=FULL_SHARD --activation_checkpointing=full".split()
    question = [MPT7B, "--device=h100", "--devices=8", "--microbatch_size=8", *layout]
    assert not assumptions(capsys, "DOUBTFUL", *question, "--attention_efficiency=0.6")
    fast = ["--attention_efficiency=0.8", "--bandwidth=1e6"]
    assert assumptions(capsys, "DOUBTFUL", *question, *fast)


def test_a_bad_number_of_devices_does_not_lose_the_table(capsys):
    """Its row says why."""
    question = [MPT7B, "--device=mi250", "--pp=1"]
    strong = planned(capsys, *question, "--sweep_devices=8,7,16")[:3]
    assert "set --global_batch_size=1022 or 1029" in strong[0]["problem"]
    assert strong[1]["efficiency"] == 1
    assert strong[1:] == planned(capsys, *question, "--sweep_devices=8,16")[:2]


NUMBERS = {
    name: parser.range_of(hint)
    for cls in (PlanArgs, search.LayoutArgs)
    for name, hint in get_type_hints(cls, include_extras=True).items()
    if {int, float} & set(parser.members_of(parser.types_of(cls)[name]))
}


@pytest.mark.parametrize("name", NUMBERS)
def test_an_absurd_number_is_refused_and_any_other_has_an_answer(capsys, name):
    """In JSON, which has no Infinity and no NaN."""
    low, high = NUMBERS[name]
    question = [MPT125M, "--device=mi250", *FIXED.split(), "--price=2", "--watts=500", "--json"]
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
        pytest.param(
            "MPT70B --device=mi250 --devices=8 --global_batch_size=256", marks=pytest.mark.slow
        ),
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


def test_a_layout_that_does_not_fit_names_what_would(capsys):
    question = [MPT7B, *FIXED.split(), "--microbatch_size=4", "--device=mi250", "--devices=4"]
    found = planned(capsys, *question)
    assert not found["fits"] and found["share_of_memory"] > memory.ROOM
    assert printed(capsys, *question).count("DOES NOT FIT") == 2  # in the table, and below
    (fix,) = found["would_fit"]
    assert planned(capsys, *question, *fix.split())["fits"]
    assert planned(capsys, *question, "--memory_gb=1000")["fits"]


# The flags of a question, MPT7B for its config file, and a part of the answer.
MISTAKES = [
    ("MPT7B", "which device?"),
    ("MPT7B --device=mi520", "did you mean mi250"),
    ("MPT7B --device=v100", "no bf16 peak known for V100"),
    ("MPT7B --device=mi250 --devices=8 --tp=3", "set --devices=6 or 9"),
    ("MPT7B --device=h100 --devices=16 --tp=16", "tp 16 does not divide the 8 devices of a node"),
    ("MPT7B --device=mi250 --sweep_devices=0,8", "devices must be from 1 to 1,000,000, not 0"),
    ("MPT7B --device=mi250 --sweep_devices=8,x", "expected whole numbers, such as 8,16,64"),
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


# --------------------------------------------------------------------------------------------------
# Error bands


def test_what_a_run_takes_and_its_band(capsys):
    flags = ["--device=h100", "--devices=64", "--price=2", "--watts=500", "--tokens=1e11"]
    found = planned(capsys, MPT7B, *flags)
    rate = found["tokens_per_second"]
    hours = 1e11 / rate / 3600
    assert found["days"] == pytest.approx(hours / 24)
    assert found["cost"] == pytest.approx(hours * 64 * 2)
    assert found["kwh"] == pytest.approx(hours * 64 * 0.5)
    assert f": {24 * found['days']:.3g} hours (" in printed(capsys, MPT7B, *flags)
    low, high = answer.BANDS[found["certainty"]]
    assert found["certainty"] == "several nodes"
    assert found["band"].pop("tokens_per_second") == pytest.approx([low * rate, high * rate])
    for name, ends in found["band"].items():
        assert ends == pytest.approx([found[name] / high, found[name] / low])
    assert set(found["band"]) == {"days", "cost", "kwh"}


def test_no_band_ends_beyond_what_matmuls_allow(capsys):
    """Adapters of 8 x 7B have little else."""
    question = [LORA, "--lora_rank=16", "--device=4090", "--devices=1", "--max_seq_len=512"]
    question += ["--memory_gb=80", "--attention_efficiency=0.9", "--bandwidth=1e6"]
    found = planned(capsys, *question)
    most = found["seconds"]["step"] / (0.7 * found["seconds"]["matmuls"])
    high = found["band"]["tokens_per_second"][1] / found["tokens_per_second"]
    assert high == pytest.approx(min(most, answer.BANDS["anything else"][1]))


@pytest.mark.parametrize(
    "flags, kind",
    [
        ("--device=a100", "one node"),
        ("--device=h100 --devices=4", "one node"),
        ("--device=a100 --devices=16", "several nodes"),
        ("--device=a100 --tp=2", "tp or pp"),
        ("--device=a100 --pp=2 --compile", "tp or pp"),  # where nothing is compiled
        ("--device=mi250 --tp=2", "anything else"),
        ("--device=a100 --devices=1 --memory_gb=999", "anything else"),
        ("--device=a100 --compile", "anything else"),
        ("--device=a100 --lora_rank=8", "anything else"),
        ("--device=a100 --attention_efficiency=0.6", "anything else"),
    ],
)
def test_a_band_is_that_of_runs_of_its_kind(capsys, flags, kind):
    layout = "--tp=1 --pp=1 --sharding=FULL_SHARD --microbatch_size=4".split()
    question = [MPT7B, *layout, "--activation_checkpointing=full", *flags.split()]
    assert planned(capsys, *question)["certainty"] == kind


# --------------------------------------------------------------------------------------------------
# Several kinds of device


def test_kinds_beside_each_other_are_what_each_alone_is(capsys):
    question = [MPT7B, "--device=h100,mi250", "--sweep_devices=8,16"]
    question += ["--price=2.5,1.2", "--network=400,100"]
    rows = planned(capsys, *question)
    found = [(row["label"], row["devices"]) for row in rows]
    h100, mi250 = "H100 SXM, price 2.5, network 400", "MI250 GCD, price 1.2, network 100"
    assert found == [(h100, 8), (h100, 16), (mi250, 8), (mi250, 16)]
    assert f"{mi250}: speed EXTRAPOLATED" in printed(capsys, *question)
    kinds = [("h100", 2.5, 400), ("mi250", 1.2, 100)]
    for (device, price, network), row in zip(kinds, rows[1::2], strict=True):
        flags = [f"--device={device}", f"--price={price}", f"--network={network}"]
        alone = planned(capsys, MPT7B, *flags, "--devices=16")
        row |= {"label": alone["label"]}
        assert row.items() <= alone.items()


def test_a_kind_that_cannot_hold_the_model_says_why_beside_the_other(capsys):
    flags = [MPT7B, "--device=mi250,4090", "--devices=8", "--choose", "--tp=1", "--pp=1"]
    flags += ["--microbatch_size=1"]
    with pytest.raises(UserError):
        plan.main([*flags, "--sharding=DDP"])
    with_plan, without = planned(capsys, *flags, "--sharding=ZERO1")
    assert with_plan["fits"]
    assert without["device"] == "RTX 4090" and without["problem"]
    assert without["problem"] in printed(capsys, *flags, "--sharding=ZERO1")


# --------------------------------------------------------------------------------------------------
# Adapters


def test_7b_with_adapters_on_one_card_of_24_gb(capsys):
    """Its length is the finetune's 500 steps; the base is frozen in bf16."""
    question = [LORA, "--lora_rank=16", "--device=4090", "--devices=1"]
    found = planned(capsys, *question)
    assert found["fits"]
    n = 6_649_286_656 - 65 * 4096
    assert found["bytes"]["frozen weights"] == 2 * n + 4 * 65 * 4096
    adapters = 16 * 32 * (4 + 2 + 5 + 5) * 4096
    assert found["bytes"]["Adam's moments, fp32"] == 8 * adapters
    assert (found["tokens"], found["max_steps"]) == (500 * 32 * 2048, 500)
    per_token = 4 * n + 6 * adapters + 12 * 32 * 4096 * 2048
    rate = found["mfu"] * 165.2e12 / found["tokens_per_second"]
    assert rate == pytest.approx(per_token, rel=0.01) and rate < per_token

    chosen = planned(capsys, *question, "--choose")
    assert chosen["fits"] and chosen["tokens_per_second"] >= found["tokens_per_second"]
    with pytest.raises(UserError):  # all weights do not fit
        plan.main([*question, "--lora_rank=0", "--init_from="])


def test_adapters_on_a_recipe_of_pretraining(capsys):
    """No base needs to be named for a plan."""
    question = [MPT7B, "--lora_rank=16", "--device=4090", "--devices=1", "--choose"]
    found = planned(capsys, *question, "--max_steps=200")
    assert found["fits"] and "frozen weights" in found["bytes"]
    assert found["tokens"] == 200 * 1024 * 2048
    shape = ["--d_model=4096", "--n_heads=32", "--n_layers=32"]
    assert planned(capsys, *shape, *question[1:])["max_steps"] == 4800


# --------------------------------------------------------------------------------------------------
# Pictures


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: see requirements-extra.txt")
    saved = []
    monkeypatch.setattr(picture, "save", lambda figure, path: saved.append(figure))
    return saved


def test_a_line_and_a_band_for_each_kind(drawn):
    """Told apart without colours, too. All text is inside the picture."""
    kinds = ["--device=h100,mi250", "--price=2.5,1.2"]
    plan.main([MPT7B, *kinds, "--sweep_devices=8,16", "--plot"])
    (figure,) = drawn
    for axes, words in zip(figure.axes, ["days", "cost", "tokens/s", "kWh"], strict=True):
        assert axes.get_ylabel().startswith(words)
        first, second = axes.lines
        assert len(first.get_xdata()) == len(second.get_xdata()) == 2
        assert first.get_linestyle() != second.get_linestyle()
        assert first.get_marker() != second.get_marker()
        assert len(axes.collections) == 2  # bands
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [name.split(",")[0] for name in names] == ["H100 SXM", "MI250 GCD"]
    figure.draw_without_rendering()
    for text in (figure._supxlabel, figure.legends[0]):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


def test_a_sweep_draws_speed_and_efficiency(drawn):
    plan.main([MPT7B, "--device=mi250", "--sweep_devices=8,16", "--plot"])
    (figure,) = drawn
    assert {"tokens/s", "efficiency"} <= {axes.get_ylabel() for axes in figure.axes}
    assert {len(axes.lines) for axes in figure.axes} == {2}  # strong and weak
    plan.main([MPT7B, "--device=h100,mi250", "--sweep_devices=8,16", "--plot"])
    assert len(drawn[1].axes) == 3  # no price, and no empty panel in its place


def test_memory_by_sharding_where_nodes_do_not_divide_the_ranks(tmp_path):
    """12 data-parallel ranks on nodes of 8: groups of 4."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: see requirements-extra.txt")
    out = tmp_path / "plan.png"
    question = [MPT7B, "--device=h100", "--devices=12", "--global_batch_size=1020"]
    plan.main([*question, "--tp=1", "--pp=1", "--plot", f"--out={out}"])
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 20_000


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="^pictures need matplotlib: make setup-lessons"):
        plan.main([MPT7B, "--device=mi250", "--devices=16", "--plot"])

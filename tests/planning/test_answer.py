"""planning/answer.py: error bands, prices and energy, kinds of device beside each other."""

import json
from pathlib import Path

import pytest

import plan
from config import UserError
from planning import answer, certainty

CONFIGS = Path(__file__).parent.parent.parent / "configs"
MPT7B, LORA = str(CONFIGS / "mpt7b.py"), str(CONFIGS / "lora_mpt7b.py")
TWO_KINDS = [MPT7B, "--device=h100,mi250", "--sweep_devices=8,16"]


def planned(capsys, *argv):
    """The JSON that plan.py prints for these arguments."""
    plan.main([*argv, "--json"])
    return json.loads(capsys.readouterr().out)


def printed(capsys, *argv) -> str:
    """The text that plan.py prints for these arguments."""
    plan.main(list(argv))
    return capsys.readouterr().out


def band_of_a_test(m, cfg, fleet):
    """A band in place of `certainty.band`'s, whose figures change with its runs."""
    return 0.8, 1.1, "a band of a test"


def test_bands_follow_from_that_of_the_speed(capsys, monkeypatch):
    monkeypatch.setattr(certainty, "band", band_of_a_test)
    flags = ["--device=h100", "--devices=64", "--price=2", "--watts=500", "--tokens=1e11"]
    found = planned(capsys, MPT7B, *flags)
    band = found["band"]
    for name in ("tokens_per_second", "tokens_per_cost"):
        assert band[name] == pytest.approx([0.8 * found[name], 1.1 * found[name]])
    for name in ("days", "mwh", "cost", "kwh_per_billion_tokens"):
        assert band[name] == pytest.approx([found[name] / 1.1, found[name] / 0.8])

    hours = 1e11 / found["tokens_per_second"] / 3600
    assert found["kwh_per_billion_tokens"] == pytest.approx(hours * 64 * 0.5 / 100)
    assert found["tokens_per_cost"] == pytest.approx(1e11 / (hours * 64 * 2))

    out = printed(capsys, MPT7B, *flags)
    rate = found["tokens_per_second"]
    low, high = answer.rounded(0.8 * rate), answer.rounded(1.1 * rate)
    assert f"speed       {rate:,.0f} tokens/s ({low} to {high}), " in out
    assert "certainty   a band of a test" in out


def test_no_band_ends_beyond_what_matmuls_allow(capsys, monkeypatch):
    monkeypatch.setattr(certainty, "band", lambda m, cfg, fleet: (0.5, 9.0, "wide"))
    found = planned(capsys, MPT7B, "--device=h100")
    seconds = found["seconds"]
    most = found["tokens_per_second"] * seconds["step"] / seconds["matmuls"]
    assert found["band"]["tokens_per_second"][1] == pytest.approx(most)
    assert found["certainty"] == "wide; at most as fast as the matmuls alone"


def test_matmuls_of_an_unknown_speed_bound_no_band_but_the_peak_does(capsys, monkeypatch):
    monkeypatch.setattr(certainty, "band", lambda m, cfg, fleet: (0.5, 9.0, "wide"))
    found = planned(capsys, MPT7B, "--device=4090", "--devices=64", "--choose")
    seconds = found["seconds"]
    at_the_peak = 0.7 * seconds["matmuls"]
    most = found["tokens_per_second"] * seconds["step"] / at_the_peak
    assert found["band"]["tokens_per_second"][1] == pytest.approx(most)
    assert found["certainty"] == "wide; at most as fast as the matmuls alone at the peak"


def test_a_plan_names_the_kind_of_run_that_was_never_compared(capsys):
    found = planned(capsys, MPT7B, "--device=mi250", "--devices=16", "--tp=4")
    assert "too few runs" in found["certainty"]
    low, high = found["band"]["tokens_per_second"]
    assert low < found["tokens_per_second"] < high


@pytest.mark.parametrize(
    "question",
    [
        ["--device=h100", "--sweep_devices=8,16"],
        ["--device=h100", "--budget=1"],
        ["--device=h100,mi250"],
    ],
)
def test_every_answer_has_bands(capsys, question):
    model = [] if "--budget=1" in question else [MPT7B]
    found = planned(capsys, *model, *question)
    rows = found if isinstance(found, list) else [found]
    for row in rows:
        figures = row.get("strong", row)
        assert figures["certainty"]
        assert figures["band"]["days"][0] < figures["days"] < figures["band"]["days"][1]


def test_without_a_price_or_watts_nothing_is_made_up(capsys):
    found = planned(capsys, MPT7B, "--device=tpu-v5p", "--devices=64")
    for name in ("mwh", "kwh_per_billion_tokens", "tokens_per_cost"):
        assert found[name] is None
        assert found["band"][name] is None
    assert "cost" not in printed(capsys, MPT7B, "--device=h100,mi250")


def test_kinds_beside_each_other_are_what_each_alone_is(capsys):
    rows = planned(capsys, *TWO_KINDS, "--price=2.5,1.2", "--network=400,100")
    found = [(row["device"], row["devices"]) for row in rows]
    assert found == [("H100 SXM", 8), ("H100 SXM", 16), ("MI250 GCD", 8), ("MI250 GCD", 16)]
    kinds = [("h100", 2.5, 400), ("mi250", 1.2, 100)]
    for (device, price, network), row in zip(kinds, rows[1::2], strict=True):
        flags = [f"--device={device}", f"--price={price}", f"--network={network}"]
        assert row.pop("label") == f"{row['device']} at {price}"
        row.pop("best")
        assert row.items() <= planned(capsys, MPT7B, *flags, "--devices=16").items()


def test_a_table_of_kinds_says_which_is_best_and_where_bands_overlap(capsys, monkeypatch):
    monkeypatch.setattr(certainty, "band", band_of_a_test)
    rows = planned(capsys, *TWO_KINDS, "--price=2.5,0.55")
    out = printed(capsys, *TWO_KINDS, "--price=2.5,0.55").splitlines()
    for row in rows:
        (line,) = [
            line for line in out if line.startswith(row["device"]) and f" {row['devices']} " in line
        ]
        assert f"{row['tokens_per_second']:,.0f}" in line
        assert f"{row['cost']:,.0f} (" in line
        assert answer.rounded(row["kwh_per_billion_tokens"]) in line

    best = min(rows, key=lambda row: row["cost"])
    (line,) = [line for line in out if line.startswith("cheapest")]
    assert f"{best['cost']:,.0f} (" in line.split(";")[0]
    assert best["device"] in line.split(";")[0]
    for word, name in (("cheapest", "cost"), ("fastest", "days")):
        (line,) = [line for line in out if line.startswith(word)]
        of_kind = [
            min(row[name] for row in rows if row["device"].startswith(k)) for k in ("H", "M")
        ]
        overlap = min(of_kind) / 0.8 > max(of_kind) / 1.1
        assert line.endswith("the bands overlap") == overlap


def test_two_fleets_of_the_same_device_are_told_apart(capsys):
    """By what differs; each keeps what it assumes."""
    question = [MPT7B, "--device=h100,h100", "--sweep_devices=8,16", "--network=100,0"]
    slow, usual = "H100 SXM, network 100", "H100 SXM, network as usual"
    rows = planned(capsys, *question)
    assert [row["label"] for row in rows] == [slow, slow, usual, usual]
    out = printed(capsys, *question)
    assert f"{usual}: network 400 GB/s a node" in out
    assert "; " in next(line for line in out.splitlines() if line.startswith("fastest"))

    many = [*question[:2], "--memory_gb=80,94", "--network=100,400", "--price=2,2"]
    labels = [row["label"] for row in planned(capsys, *many)]
    assert labels[0] == "H100 SXM at 2, network 100, memory_gb 80"
    assert labels[1] == "H100 SXM at 2, network 400, memory_gb 94"
    other_price = planned(capsys, *many[:2], "--price=2,3")
    assert [row["label"] for row in other_price] == ["H100 SXM at 2", "H100 SXM at 3"]


@pytest.mark.parametrize(
    "kinds", ["--device=h100,mi250 --price=2.5,0.55", "--device=h100 --price=2"]
)
def test_json_says_which_is_best_as_the_text_does(capsys, monkeypatch, kinds):
    monkeypatch.setattr(certainty, "band", band_of_a_test)
    question = [MPT7B, *kinds.split(), "--sweep_devices=8,16"]
    rows = planned(capsys, *question)
    lines = printed(capsys, *question).splitlines()
    for word in answer.BEST:
        (line,) = [line for line in lines if line.startswith(word)]
        (row,) = [row for row in rows if word in row["best"]]
        figures = row.get("strong", row)
        assert f"on {figures['devices']} x {figures['device']}" in line.split(";")[0]
        assert row["best"][word]["bands_overlap"] == line.endswith("the bands overlap")


def test_json_has_what_the_text_says_beside_the_plan(capsys):
    """Published figures, restarts, and how the settings as they are would do."""
    frontier = [str(CONFIGS / "frontier_175b.py"), "--device=mi250x", "--devices=1024"]
    found = planned(capsys, *frontier, "--choose")
    out = printed(capsys, *frontier, "--choose")
    assert f"{found['published']['tflops_per_device']} TFLOP/s a GCD on Frontier" in out
    assert f"this plan: {found['published']['planned']:.1f}" in out
    assert found["published"]["planned"] == found["tflops_per_device"]
    assert found["restarts"] == answer.JOB_DAYS
    own = found["your_layout"]
    assert own["settings"]["activation_checkpointing"] == "full" and own["fits"]
    assert f": {own['tokens_per_second']:,.0f} tokens/s; this plan is {own['gain']:.0%} f" in out

    plain = planned(capsys, MPT7B, "--device=h100", "--tokens=1e9")
    assert plain["published"] is plain["your_layout"] is None
    assert plain["restarts"] == {}


def test_a_kind_that_cannot_hold_the_model_says_why_beside_the_other(capsys):
    flags = [MPT7B, "--device=mi250,4090", "--devices=8", "--choose", "--tp=1", "--pp=1"]
    flags += ["--sharding=DDP"]
    with pytest.raises(UserError):
        plan.main(flags)
    flags[-1] = "--sharding=ZERO1"
    with_plan, without = planned(capsys, *flags)
    assert with_plan["fits"]
    assert without["device"] == "RTX 4090" and without["problem"]
    assert without["problem"] in printed(capsys, *flags)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--device=h100,mi250 --price=1,2,3", "--price=1,2,3 has 3 values: 2 kinds of device need"),
        ("--device=h100 --price=1,2", "price in the command line is '1,2', expected a number"),
        ("--device=h100,mi520", "did you mean mi250"),
        ("--device=h100 --budget=7 --lora_rank=8", "to train from scratch: remove --lora_rank"),
        ("--device=h100,mi250 --budget=7", "--budget plans for one kind of device"),
    ],
)
def test_mistakes_with_several_kinds(flags, message):
    with pytest.raises(UserError) as error:
        plan.main(flags.split())
    assert message in str(error.value)


def test_7b_with_adapters_on_one_card_of_24_gb(capsys):
    """Its length is the finetune's 500 steps; the base is frozen in bf16."""
    question = [LORA, "--lora_rank=16", "--device=4090", "--devices=1"]
    found = planned(capsys, *question)
    assert found["fits"]
    assert found["bytes"]["frozen weights"] == 2 * (6_649_286_656 - 65 * 4096) + 4 * 65 * 4096
    adapters = 16 * 32 * (4 + 2 + 5 + 5) * 4096
    assert found["bytes"]["Adam's moments, fp32"] == 8 * adapters
    assert found["tokens"] == 500 * 32 * 2048
    n = 6_649_286_656 - 65 * 4096
    per_token = 4 * n + 6 * adapters + 12 * 32 * 4096 * 2048
    rate = found["mfu"] * 165.2e12 / found["tokens_per_second"]
    assert rate == pytest.approx(per_token, rel=0.01) and rate < per_token
    assert "adapters" in found["certainty"]
    out = printed(capsys, *question)
    assert "32.77M tokens, --max_steps=500: " in out and " hours (" in out
    assert "at most 4 N + 6 N_lora + 12 L d S" in out

    chosen = planned(capsys, *question, "--choose")
    assert chosen["fits"] and chosen["tokens_per_second"] >= found["tokens_per_second"]
    with pytest.raises(UserError):  # all weights do not fit
        plan.main([*question, "--lora_rank=0", "--init_from="])


def test_adapters_on_a_recipe_of_pretraining(capsys):
    """No base needs to be named for a plan; whose length it is, is told."""
    question = [MPT7B, "--lora_rank=16", "--device=4090", "--devices=1", "--choose"]
    found = planned(capsys, *question)
    assert found["fits"] and "frozen weights" in found["bytes"]
    (line,) = [line for line in found["assumed"] if "pretraining's length" in line]
    assert line.startswith("20.1 tokens for each parameter of the base")
    short = planned(capsys, *question, "--max_steps=200")
    assert short["tokens"] == 200 * 1024 * 2048
    assert not any("pretraining" in line for line in short["assumed"])

    shape = ["--d_model=4096", "--n_heads=32", "--n_layers=32"]
    unsaid = planned(capsys, *shape, *question[1:])
    assert unsaid["max_steps"] == 4800
    assert any("4,800 steps, fsdp_train.py's default" in line for line in unsaid["assumed"])


def test_a_batch_that_is_chosen_does_not_change_the_steps(capsys):
    layout = ["--tp=1", "--pp=1", "--sharding=ZERO1", "--microbatch_size=1"]
    layout += ["--activation_checkpointing=full"]
    for flags in (["--devices=8", "--lora_rank=8"], ["--devices=96"]):
        found = planned(capsys, "--device=h100", "--max_steps=200", *flags, *layout)
        assert found["max_steps"] == 200


def test_numbers_are_written_for_people():
    assert answer.rounded(1463500) == "1,460,000"
    assert answer.rounded(0.70632) == "0.706"
    assert answer.tokens_text(32_768_000) == "32.77M tokens"
    assert answer.tokens_text(134e9) == "134B tokens"
    assert answer.tokens_text(716_800) == "716,800 tokens"
    assert answer.duration(0.16, [0.13, 0.23]) == "3.84 hours (3.12 to 5.52)"
    assert answer.duration(2, [1, 3]) == "2 days (1 to 3)"
    minute = 1 / 24 / 60
    assert answer.duration(60 * minute, [30 * minute, 90 * minute]) == "60 minutes (30 to 90)"
    assert answer.duration(minute / 60, [minute / 60, minute / 30]) == "1 second (1 to 2)"
    assert answer.duration(0.000116 / 24, [0, 1e-5]) == "0.418 seconds (0 to 0.864)"
    assert answer.energy(0.0029, [0.002, 0.004]) == "2.9 kWh (2 to 4)"
    assert answer.energy(1.48e-7, [1e-7, 2e-7]) == "0.148 Wh (0.1 to 0.2)"


def test_one_rank_and_one_day_are_singular(capsys):
    one = printed(capsys, MPT7B, "--device=h100", "--devices=1", "--choose", "--lora_rank=8")
    assert " = 1 data-parallel rank x " in one
    assert " = 8 data-parallel ranks x " in printed(capsys, MPT7B, "--device=h100", "--choose")
    assert "budget      1 day, " in printed(capsys, "--device=h100", "--budget=1")


def test_how_often_is_no_setting_of_a_layout_that_recomputes_nothing(capsys, tmp_path):
    """Recomputing every 8th block is chosen here; the config file recomputes none."""
    path = tmp_path / "own.py"
    path.write_text((CONFIGS / "mpt1b.py").read_text() + "activation_checkpointing = 'none'\n")
    found = planned(capsys, str(path), "--device=4090", "--devices=8", "--choose")
    assert found["layout"]["recompute_every"] > 1
    settings = found["your_layout"]["settings"]
    assert settings["activation_checkpointing"] == "none"
    assert "recompute_every" not in settings


def test_what_does_not_fit_without_recomputation_says_no_checkpointing():
    flags = "--device=4090 --devices=8 --tp=1 --pp=1 --activation_checkpointing=none"
    with pytest.raises(UserError, match=", no checkpointing, microbatch 1 takes "):
        plan.main([MPT7B, *flags.split(), "--microbatch_size=auto"])


def test_a_budget_says_which_answer_is_which_and_what_limits_it(capsys):
    """Without sharding and recomputation, a week of 64 devices is more than what fits can use."""
    fleet = ["--device=h100", "--devices=64", "--budget=7"]
    layout = "--sharding=DDP --tp=1 --pp=1 --activation_checkpointing=none".split()
    for flags, limited in (([], False), (layout, True)):
        optimal, smaller = planned(capsys, *fleet, *flags)["trainings"]
        assert (optimal["tokens_per_parameter"] > 24) == limited
        assert (optimal["limited_by_memory"], smaller["limited_by_memory"]) == (limited, False)
        lines = printed(capsys, *fleet, *flags).splitlines()
        (first,) = [line for line in lines if line.startswith("budget")]
        (second,) = [line for line in lines if line.startswith("or smaller")]
        words = "not compute-optimal, memory limits it" if limited else "7 days, compute-optimal:"
        assert words in first
        assert "smaller, trained for longer: " in second

"""plan.py: layouts that are chosen and taken, scaling, budgets, pictures, and its speed."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import config
import flops
import plan
from config import MPTConfig, TrainConfig, UserError
from plan import PlanArgs
from planning import memory, search

ROOT = Path(__file__).parent.parent
MPT7B, MPT70B = (str(ROOT / f"configs/{name}.py") for name in ("mpt7b", "mpt70b"))


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


def test_figures_follow_from_each_other(capsys):
    flags = ["--device=mi250", "--devices=64", "--price=2", "--watts=300", "--tokens=1e11"]
    found = planned(capsys, MPT7B, *flags)
    hours = 1e11 / found["tokens_per_second"] / 3600
    assert found["days"] == pytest.approx(hours / 24)
    assert found["cost"] == pytest.approx(hours * 64 * 2)
    assert found["mwh"] == pytest.approx(hours * 64 * 300 / 1e6)
    m = MPTConfig(d_model=4096, n_heads=32, n_layers=32)
    per_device = found["tokens_per_second"] * flops.train_flops_per_token(m) / 64
    assert found["tflops_per_device"] == pytest.approx(per_device / 1e12)
    assert found["mfu"] == pytest.approx(per_device / 181.05e12)


def test_tokens_are_the_config_files_else_twenty_a_parameter(capsys):
    assert planned(capsys, MPT7B, "--device=h100")["tokens"] == 63900 * 1024 * 2048
    assert not assumptions(capsys, "tokens a parameter", MPT7B, "--device=h100")
    found = planned(capsys, "--device=h100")
    assert found["tokens"] == 20 * found["n_params"]
    assert assumptions(capsys, "20 tokens a parameter", "--device=h100")


def test_tokens_become_the_steps_to_set(capsys):
    out = printed(capsys, MPT7B, "--device=mi250", "--devices=64", "--tokens=1e9")
    assert "1B tokens, --max_steps=477: " in out  # 1e9 / (1024 x 2048) = 476.8
    assert planned(capsys, MPT7B, "--device=mi250", "--devices=64")["max_steps"] == 63900


def test_a_plan_says_what_the_config_as_it_is_would_give(capsys, tmp_path):
    """The gain is the ratio of two plans, one with the config's own layout.

    If the plan is that layout, there is no line.
    """
    lines = (ROOT / "configs/mpt1b.py").read_text().splitlines()
    without_sharding = [line for line in lines if not line.startswith("sharding")]
    path = tmp_path / "left_open.py"
    path.write_text("\n".join(without_sharding))
    flags = [str(path), "--device=mi250", "--devices=8"]
    own = planned(capsys, *flags, "--sharding=FULL_SHARD")["tokens_per_second"]
    best = planned(capsys, *flags)
    assert best["layout"]["sharding"] == "ZERO1"
    gain = best["tokens_per_second"] / own - 1
    line = f"your layout sharding=FULL_SHARD: {own:,.0f} tokens/s; this plan is {gain:.0%} faster"
    assert line in printed(capsys, *flags)
    assert "your layout" not in printed(capsys, *flags, "--sharding=FULL_SHARD")
    assert "your layout" not in printed(capsys, "--device=mi250")


@pytest.mark.parametrize("flag", ["--sharding=auto", "--activation_checkpointing=auto"])
def test_what_is_left_open_is_not_how_the_config_stands(capsys, flag):
    out = printed(capsys, MPT7B, "--device=mi250", flag)
    assert "\nflags  " in out
    assert "your layout" not in out


def test_a_config_that_does_not_fit_as_it_is(capsys, tmp_path):
    path = tmp_path / "big.py"
    path.write_text(Path(MPT7B).read_text() + "activation_checkpointing = 'none'\n")
    lines = printed(capsys, str(path), "--device=mi250", "--choose").splitlines()
    (own,) = [line for line in lines if line.startswith("your layout")]
    assert "activation_checkpointing=none" in own
    assert own.endswith("DOES NOT FIT")


def test_a_card_of_two_devices_is_told(capsys):
    (line,) = assumptions(capsys, "card", MPT7B, "--device=mi250", "--devices=4")
    assert "a card is 2 torch devices: 4 are 2 cards" in line
    assert not assumptions(capsys, "card", MPT7B, "--device=h100", "--devices=4")


def test_the_days_of_a_job_are_those_of_its_script():
    for name, days in plan.JOB_DAYS.items():
        script = (ROOT / name).read_text()
        time = re.search(r"#SBATCH --time=(\d+):(\d+):(\d+)", script)
        hours, minutes, seconds = map(int, time.groups())
        restarts = int(re.search(r"SLURM_RESTART_COUNT:-0} < (\d+)", script)[1])
        assert minutes == seconds == 0
        assert days == (restarts + 1) * hours / 24
        assert f"51 jobs of {hours} hours are {int(days)} days" in script


def test_runs_that_outlive_the_restarts_of_a_job_are_told(capsys):
    flags = [MPT7B, "--device=mi250", "--devices=64"]
    out = printed(capsys, *flags)  # 13 days
    assert "train_srun.sbatch ends after 50 restarts, 4.25 days" in out
    assert "train.sbatch ends" not in out
    assert "restarts" not in printed(capsys, *flags, "--tokens=1e9")


def test_what_is_chosen_fits_and_is_at_least_as_fast(capsys):
    taken = planned(capsys, MPT7B, "--device=mi250", "--devices=64")
    chosen = planned(capsys, MPT7B, "--device=mi250", "--devices=64", "--choose")
    assert chosen["fits"]
    assert chosen["share_of_memory"] <= memory.ROOM
    assert chosen["tokens_per_second"] >= taken["tokens_per_second"]


# GPT-3's shape.
BIG = "--d_model=12288 --n_heads=96 --n_layers=96 --vocab_size=51200 --global_batch_size=1024"


def test_the_least_model_parallelism_that_fits(capsys):
    flags = BIG.split()
    found = planned(capsys, *flags, "--device=mi250x", "--devices=1024", "--sharding=ZERO1")
    layout = found["layout"]
    product = layout["tp"] * layout["pp"]
    assert product > 1
    assert found["fits"]
    assert layout["dp"] * product == 1024
    said = any(line.startswith("pipeline parallelism: bytes") for line in found["assumed"])
    assert said == (layout["pp"] > 1)

    m, cfg, _ = config.load([*flags, "--attn_impl=sdpa"], MPTConfig, TrainConfig, PlanArgs)
    cfg = replace(cfg, sharding="ZERO1", activation_checkpointing="full", microbatch_size=1)
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1)):
        if tp * pp < product:
            cut = replace(cfg, tp=tp, pp=pp)
            peak = memory.bytes_by_part(m, cut, 1024)["peak"]
            assert peak > memory.ROOM * 64 * 2**30, (tp, pp)


def test_a_layout_that_is_all_given_is_told_though_it_does_not_fit(capsys):
    flags = "--tp=1 --pp=1 --sharding=DDP --microbatch_size=4 --activation_checkpointing=none"
    question = [MPT7B, *flags.split(), "--device=mi250", "--devices=8"]
    found = planned(capsys, *question)
    assert not found["fits"]
    assert found["share_of_memory"] > 1
    assert "DOES NOT FIT" in printed(capsys, *question)


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
    assert [row["devices"] for row in rows] == [8, 64, 256]
    assert rows[0]["efficiency"] == {"strong": 1, "weak": 1}
    for row in rows:
        assert row["strong"]["layout"]["global_batch_size"] == 1024
        assert row["weak"]["layout"]["global_batch_size"] == 1024 * row["devices"] // 8
        for name in ("strong", "weak"):
            rate = row[name]["tokens_per_second"] / row["devices"]
            first_rate = rows[0][name]["tokens_per_second"] / 8
            assert row["efficiency"][name] == pytest.approx(rate / first_rate)
    alone = planned(capsys, *flags, "--devices=64")
    assert alone["seconds"] == rows[1]["strong"]["seconds"]


def test_a_table_of_a_sweep(capsys):
    out = printed(capsys, MPT7B, "--device=mi250", "--sweep_devices=8,16,32")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["8", "16", "32"]
    assert "100.0%" in lines[2]
    assert any(line.startswith("assumed: network") for line in lines)


@pytest.mark.parametrize("device, n, days", [("h100", 64, 7), ("mi250", 8, 30), ("h100", 512, 7)])
def test_a_budget_is_used_up(capsys, device, n, days):
    flags = [f"--device={device}", f"--devices={n}", "--network=200"]
    found = planned(capsys, *flags, f"--budget={days}")
    assert found["tokens"] == 20 * found["n_params"]
    assert 0.6 * days < found["days"] <= days
    more = planned(capsys, *flags, f"--budget={4 * days}")  # cost grows with the square of the size
    assert 1.3 < more["n_params"] / found["n_params"] < 2.2


def test_a_budget_finds_the_largest_of_all_widths(capsys):
    """Every width is tried here, without the shortcuts of search.budget."""
    flags = ["--device=a100", "--devices=16", "--network=200"]
    found = planned(capsys, *flags, "--budget=2")
    largest = 0
    for width in search.WIDTHS:
        if width > 4096:
            continue
        m = search.shape(width, MPTConfig())
        model = [f"--{name}={getattr(m, name)}" for name in ("d_model", "n_heads", "n_layers")]
        trial = planned(capsys, *flags, *model)
        if trial["days"] <= 2:
            largest = max(largest, trial["n_params"])
    assert found["n_params"] == largest


def test_of_equal_parallelism_the_faster_is_taken(capsys):
    flags = [*BIG.split(), "--device=h100", "--devices=64", "--network=400"]
    found = planned(capsys, *flags)
    product = found["layout"]["tp"] * found["layout"]["pp"]
    for tp in (1, 2, 4, 8):
        if product % tp:
            continue
        try:
            other = planned(capsys, *flags, f"--tp={tp}", f"--pp={product // tp}")
        except UserError:  # it does not fit
            continue
        assert other["tokens_per_second"] <= found["tokens_per_second"]


def test_the_flags_of_a_plan_launch_it(capsys):
    fleet = ["--device=mi250", "--devices=16"]
    found = planned(capsys, MPT7B, *fleet, "--choose", "--sharding=HYBRID_SHARD")
    assert "--sharding=HYBRID_SHARD --shard_size=8" in found["flags"]
    _, cfg = config.load([MPT7B, *found["flags"].split()], MPTConfig, TrainConfig)
    assert {name: getattr(cfg, name) for name in plan.LAYOUT}.items() <= found["layout"].items()


def test_the_flags_of_a_plan_with_tensor_ranks_launch_it(capsys, tmp_path):
    """What a config file sets is kept: tp, and sequence parallelism where there is a team."""
    path = tmp_path / "cut.py"
    path.write_text(Path(MPT7B).read_text() + "tp = 4\nsequence_parallel = True\n")
    found = planned(capsys, str(path), "--device=mi250", "--devices=16")
    assert found["layout"]["tp"] == 4 and found["layout"]["dp"] == 4
    assert "--tp=4 --sequence_parallel=True" in found["flags"]
    _, cfg = config.load([MPT7B, *found["flags"].split()], MPTConfig, TrainConfig)
    assert {name: getattr(cfg, name) for name in plan.LAYOUT}.items() <= found["layout"].items()
    assert any("tensor parallelism: bytes" in line for line in found["assumed"])
    assert "your layout" not in printed(capsys, str(path), "--device=mi250", "--devices=16")

    alone = planned(capsys, str(path), "--device=mi250", "--devices=16", "--tp=1")
    assert alone["layout"]["sequence_parallel"] is False
    assert "--tp=1" in alone["flags"] and "sequence_parallel" not in alone["flags"]


def test_the_flags_of_a_plan_with_stages_launch_it(capsys, tmp_path):
    """32 layers on 5 stages: uneven ones. The trainer has no interleaved stages: no flags."""
    path = tmp_path / "staged.py"
    path.write_text(Path(MPT7B).read_text() + "pp = 5\n")
    question = [str(path), "--device=mi250", "--devices=40"]
    found = planned(capsys, *question)
    assert (found["layout"]["pp"], found["layout"]["dp"]) == (5, 8)
    assert "--pp=5" in found["flags"]
    _, cfg = config.load([MPT7B, *found["flags"].split()], MPTConfig, TrainConfig)
    assert {name: getattr(cfg, name) for name in plan.LAYOUT}.items() <= found["layout"].items()
    assert "your layout" not in printed(capsys, *question)

    pieces = planned(capsys, *question, "--devices=32", "--pp=4", "--interleave=2")
    assert pieces["flags"] == ""
    assert any("no interleaved stages: --interleave=1" in line for line in pieces["assumed"])
    assert pieces["seconds"]["bubble"] > 0


def test_what_is_not_known_is_not_made_up(capsys):
    found = planned(capsys, MPT7B, "--device=tpu-v5p", "--devices=64")
    assert found["mwh"] is None
    found = planned(capsys, MPT7B, "--device=tpu-v3")
    assert "link not known, so 32 GB/s" in found["assumed"][0]


# The flags of a question, MPT7B for its config file, and a part of the answer.
MISTAKES = [
    ("MPT7B", "which device?"),
    ("MPT7B --device=mi520", "did you mean mi250"),
    ("MPT7B --device=v100", "no bf16 peak known for V100"),
    ("MPT7B --device=mi250 --devices=0", "devices must be at least 1, not 0"),
    ("MPT7B --device=mi250 --devices=-8", "devices must be at least 1, not -8"),
    ("MPT7B --device=mi250 --devices=8 --tp=3", "8 devices are not a multiple of tp 3"),
    (
        "MPT7B --device=mi250 --devices=24 --tp=3 --pp=1",
        "tp 3 does not divide n_heads 32: tp can be 1, 2, 4, 8, 16, 32",
    ),
    (
        "MPT7B --device=mi250 --devices=40 --pp=40 --tp=1",
        "pp 40 is more than n_layers 32: set --pp=32",
    ),
    (
        "MPT7B --device=mi250 --devices=7 --pp=1",
        "global_batch_size 1024 is not a multiple of the data-parallel ranks",
    ),
    (
        "MPT70B --device=mi250 --devices=4 --choose",
        "64.9B parameters fit 4 x MI250 GCD in no layout",
    ),
    ("MPT7B --device=mi250 --sweep_devices=8,x", "--sweep_devices needs numbers"),
    ("MPT7B --device=mi250 --sweep_devices=0,8", "--sweep_devices needs numbers above 0"),
    ("--device=mi250 --budget=0.0001", "0.0001 days on 8 x MI250 GCD are too few"),
    ("MPT7B --device=mi250 --budget=7", "--budget finds the model and its tokens: remove "),
    ("--device=mi250 --budget=7 --tokens=1e9", "remove --tokens"),
    (
        "--device=mi250 --devices=61 --budget=7 --global_batch_size=256",
        "global_batch_size 256 is not a",
    ),
    (
        "--device=mi250 --budget=7 --sweep_devices=8",
        "--budget and --sweep_devices are two questions",
    ),
    (
        "MPT7B --device=mi250 --tokens=inf",
        "tokens in the command line is inf, expected a number",
    ),
    ("MPT7B --device=mi250 --precision=fp32", "plans are for bf16"),
    ("MPT7B --device=mi250 --interleave=64", "n_layers 32 is not a multiple of interleave 64"),
    ("MPT7B --plot", "which device?"),
    ("--plot --out=plan.foo", "--out=plan.foo: "),
    ("MPT7B --device=mi250 --network=-1", "network must be 0 or more, not -1"),
    ("MPT7B --device=mi250 --interleave=0", "interleave must be at least 1, not 0"),
]


@pytest.mark.parametrize("flags, message", MISTAKES)
def test_mistakes_are_told(flags, message):
    files = {"MPT7B": MPT7B, "MPT70B": MPT70B}
    with pytest.raises(UserError) as error:
        plan.main([files.get(flag, flag) for flag in flags.split()])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        [MPT7B, "--device=mi250", "--devices=16"],
        [MPT7B, "--device=h100", "--sweep_devices=8,64"],
    ],
)
def test_pictures(tmp_path, flags):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: see requirements-extra.txt")
    out = tmp_path / "plan.png"
    plan.main([*flags, "--plot", f"--out={out}"])
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 20_000


def test_answers_come_without_torch():
    """So in a tenth of a second: importing torch takes a second or more."""
    code = "import sys, plan; plan.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, MPT7B, "--device=mi250", "--devices=64"]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)

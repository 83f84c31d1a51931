"""planning/search.py: all layouts side by side, the fastest of them, MPT's proportions."""

import subprocess
import sys
from pathlib import Path

import pytest

import devices
from config import MPTConfig, TrainConfig, UserError
from planning import search, step_time
from planning.search import LayoutArgs
from planning.step_time import Constants, Fleet

ROOT = Path(__file__).parent.parent.parent
MPT7B = str(ROOT / "configs/mpt7b.py")


def test_shapes_are_mpts():
    layers_of = {1024: 24, 2048: 24, 2560: 32, 4096: 32, 7168: 48}
    for width, layers in layers_of.items():
        m = search.shape(width, MPTConfig())
        assert (m.n_heads, m.n_layers) == (width // 128, layers)


def mpt1b_on(n: int, asked: LayoutArgs) -> tuple:
    """The arguments of a search: MPT-1B on n devices of MI250."""
    fleet = Fleet(devices.by_name("mi250"), n)
    cfg = TrainConfig(global_batch_size=256)
    return MPTConfig(), cfg, asked, fleet, Constants(), step_time.OURS


def test_the_fastest_is_the_fastest_of_all_that_fit():
    question = mpt1b_on(16, LayoutArgs())
    first = next(search.plans(*question))
    modes = {plan.cfg.sharding for plan in first}
    assert modes == {"FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "ZERO1", "DDP"}
    assert {plan.cfg.activation_checkpointing for plan in first} == {"none", "selective", "full"}
    rates = [plan.tokens_per_second for plan in first if plan.fits]
    assert min(rates) < max(rates)
    assert search.fastest(*question).tokens_per_second == max(rates)


def test_what_is_asked_is_kept_and_groups_need_several_nodes():
    asked = LayoutArgs(tp=2, pp=1, microbatch_size=2, activation_checkpointing="full")
    (plans,) = search.plans(*mpt1b_on(16, asked))
    for plan in plans:
        assert (plan.fleet.tp, plan.fleet.pp, plan.cfg.microbatch_size) == (2, 1, 2)
    hybrid = [plan for plan in plans if plan.cfg.sharding == "HYBRID_SHARD"]
    assert {plan.cfg.shard_size for plan in hybrid} == {4}

    (plans,) = search.plans(*mpt1b_on(8, asked))
    assert "HYBRID_SHARD" not in {plan.cfg.sharding for plan in plans}
    (plans,) = search.plans(*mpt1b_on(16, LayoutArgs(tp=1, pp=2, microbatch_size=2)))
    assert {plan.cfg.sharding for plan in plans} == {"ZERO1", "DDP"}


@pytest.mark.parametrize("name", ["tp", "pp", "microbatch_size"])
def test_a_layout_is_of_whole_numbers_above_0(name):
    with pytest.raises(UserError, match=f"{name} must be at least 1 or auto, not 0"):
        LayoutArgs(**{name: 0}).check()


def test_the_program_prints_all_layouts_the_fastest_first(capsys):
    search.main([MPT7B, "--device=mi250", "--devices=64", "--sharding=auto"])
    title, _, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "6.66B parameters, 64 x MI250 GCD"
    assert head.split()[0] == "tokens/s"
    rates = [int(row.split()[0].replace(",", "")) for row in rows]
    assert len(rows) == 5
    assert rates == sorted(rates, reverse=True)
    (too_large,) = [row for row in rows if row.endswith("DOES NOT FIT")]
    assert too_large.split()[7] == "DDP"


def test_where_nothing_fits_the_layouts_say_so(capsys):
    search.main([str(ROOT / "configs/mpt70b.py"), "--device=mi250", "--devices=4"])
    rows = capsys.readouterr().out.splitlines()[3:]
    assert rows and all(row.endswith("DOES NOT FIT") for row in rows)


PROGRAMS = "conventions matmuls memory step_time decode_time calibrate search picture".split()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_of_planning_helps_and_complains_without_torch(name):
    """--help begins with the file's first line; a wrong flag gives one line."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; name = sys.argv.pop(1); "
        "runpy.run_module(name, run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", code, f"planning.{name}"]
    first = (ROOT / f"planning/{name}.py").read_text().split('"""')[1].splitlines()[0]
    done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert first in done.stdout
    done = subprocess.run([*command, "--nonsense"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_programs_are_all_of_the_folder():
    files = {path.stem for path in (ROOT / "planning").glob("*.py")}
    assert files - {"__init__"} == set(PROGRAMS)

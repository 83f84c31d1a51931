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
    for width, heads, layers in (
        (1024, 8, 24),
        (2048, 16, 24),
        (2560, 20, 32),
        (4096, 32, 32),
        (7168, 56, 48),
    ):
        m = search.shape(width, MPTConfig())
        assert (m.n_heads, m.n_layers) == (heads, layers)


def of_mpt1b(asked: LayoutArgs, n: int = 16) -> tuple:
    """What the search is asked: MPT-1B on n devices of MI250."""
    m, cfg = MPTConfig(), TrainConfig(global_batch_size=256)
    return m, cfg, asked, Fleet(devices.by_name("mi250"), n), Constants(), step_time.OURS


def test_the_fastest_is_the_fastest_of_all_that_fit():
    of = of_mpt1b(LayoutArgs())
    first = next(search.plans(*of))
    modes = {one.cfg.sharding for one in first}
    assert modes == {"FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "ZERO1", "DDP"}
    assert {one.cfg.activation_checkpointing for one in first} == {"none", "selective", "full"}
    rates = [one.tokens_per_second for one in first if one.fits]
    assert search.fastest(*of).tokens_per_second == max(rates) and min(rates) < max(rates)


def test_what_is_asked_is_kept_and_groups_need_several_nodes():
    asked = LayoutArgs(tp=2, pp=1, microbatch_size=2, activation_checkpointing="full")
    (found,) = search.plans(*of_mpt1b(asked))
    assert {(one.fleet.tp, one.fleet.pp, one.cfg.microbatch_size) for one in found} == {(2, 1, 2)}
    assert {one.cfg.shard_size for one in found if one.cfg.sharding == "HYBRID_SHARD"} == {4}
    (found,) = search.plans(*of_mpt1b(asked, n=8))
    assert "HYBRID_SHARD" not in {one.cfg.sharding for one in found}
    (found,) = search.plans(*of_mpt1b(LayoutArgs(tp=1, pp=2, microbatch_size=2)))
    assert {one.cfg.sharding for one in found} == {"ZERO1", "DDP"}


@pytest.mark.parametrize("name", ["tp", "pp", "microbatch_size"])
def test_a_layout_is_of_whole_numbers_above_0(name):
    with pytest.raises(UserError, match=f"{name} must be at least 1 or auto, not 0"):
        LayoutArgs(**{name: 0}).check()


def test_the_program_prints_all_layouts_the_fastest_first(capsys):
    search.main([MPT7B, "--device=mi250", "--devices=64", "--sharding=auto"])
    title, _, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "6.66B parameters, 64 x MI250 GCD" and head.split()[0] == "tokens/s"
    rates = [int(row.split()[0].replace(",", "")) for row in rows]
    assert len(rows) == 5 and rates == sorted(rates, reverse=True)
    assert [row.split()[7] for row in rows if row.endswith("DOES NOT FIT")] == ["DDP"]


def test_where_nothing_fits_the_layouts_say_so(capsys):
    search.main([str(ROOT / "configs/mpt70b.py"), "--device=mi250", "--devices=4"])
    rows = capsys.readouterr().out.splitlines()[3:]
    assert rows and all(row.endswith("DOES NOT FIT") for row in rows)


PROGRAMS = "conventions matmuls memory step_time decode_time calibrate search picture".split()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_of_planning_helps_and_complains_without_torch(name):
    """One concept in the first line, flags where there are any; a wrong flag is one line."""
    blocked = "import runpy, sys; sys.modules['torch'] = None; name = sys.argv.pop(1); "
    code = blocked + "runpy.run_module(name, run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, f"planning.{name}"]
    first = (ROOT / f"planning/{name}.py").read_text().split('"""')[1].splitlines()[0]
    done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and first in done.stdout and done.stderr == ""
    done = subprocess.run([*command, "--nonsense"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_programs_are_all_of_the_folder():
    there = {path.stem for path in (ROOT / "planning").glob("*.py")} - {"__init__"}
    assert there == set(PROGRAMS)

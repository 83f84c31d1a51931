"""lifecycle/resume.py: damage is found before training, and another run's checkpoint is refused."""

import codecs
import contextlib
import io
import os
import re
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from test_checkpoint import META, made_up, names, save_several
from test_parallel import MODEL, RUN

import checkpoint
from config import MPTConfig, TrainConfig
from lifecycle import resume, runlog
from program import UserError
from storage import checkpoint_files

# -------------------------------------------------------------------------------------------------
# Damage is found before training


def choose(world, cfg):
    """What resume.choose answers or raises on this rank, and the lines that it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            answer = resume.choose(cfg)
        except UserError as error:
            answer = f"UserError: {error}"
    return answer, printed.getvalue().splitlines()


def chosen(ranks, size, cfg):
    """The answer, which all ranks must share, and the lines, which only rank 0 may print."""
    (answer, lines), *others = ranks(size)(choose, cfg)
    assert all(other == (answer, []) for other in others)
    return answer, lines


@pytest.fixture(scope="module")
def two_saved(ranks, tmp_path_factory):
    """A run of two ranks with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("sound")
    ranks(2)(save_several, replace(RUN, run_dir=str(folder)), [1, 2])
    return folder


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


DAMAGES = {  # what is done to a checkpoint, and what is said of it
    "truncated": (
        lambda path: os.truncate(path / "__1_0.distcp", 4096),
        r"__1_0\.distcp: 4,096 bytes instead of [\d,]+",
    ),
    "flipped": (
        lambda path: flip(path / "__1_0.distcp", 100_000),
        r"__1_0\.distcp: checksum differs",
    ),
    "no .metadata": (
        lambda path: (path / ".metadata").unlink(),
        r"\.metadata: missing",
    ),
    "no checksums": (
        lambda path: (path / "checksums.json").unlink(),
        r"checksums\.json is missing or damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_is_used(ranks, two_saved, tmp_path, damage):
    run = shutil.copytree(two_saved, tmp_path / "run")
    spoil, fault = DAMAGES[damage]
    spoil(run / "checkpoints/step-2")
    answer, (line,) = chosen(ranks, 2, replace(RUN, run_dir=str(run)))
    assert answer == run / "checkpoints/step-1"
    assert re.search(rf"step-2 is damaged \({fault}\): it is kept as step-2\.damaged", line), line
    assert names(run) == ["step-1", "step-2.damaged"]


def test_a_damaged_step_is_saved_again(ranks, two_saved, tmp_path):
    """A second damaged one is kept beside the first. If all are damaged, a new run starts."""
    run = shutil.copytree(two_saved, tmp_path / "run")
    cfg = replace(RUN, run_dir=str(run))
    for kept in ("step-2.damaged", "step-2.damaged-2"):
        (run / "checkpoints/step-2/.metadata").unlink()
        assert chosen(ranks, 2, cfg)[0].name == "step-1"
        assert kept in names(run)
        ranks(2)(save_several, cfg, [2])
        assert chosen(ranks, 2, cfg) == (run / "checkpoints/step-2", [])
    for name in ("step-1", "step-2"):
        flip(run / "checkpoints" / name / "meta.json", 5)
    answer, lines = chosen(ranks, 2, cfg)
    assert answer is None and len(lines) == 2
    assert all(line.endswith(", starting a new run") for line in lines)
    assert not checkpoint.complete(run / "checkpoints")


def test_a_damaged_one_that_was_asked_for_is_an_error(ranks, two_saved, tmp_path):
    run = shutil.copytree(two_saved, tmp_path / "run")
    newest = run / "checkpoints/step-2"
    cfg = replace(RUN, run_dir=str(tmp_path / "new"))
    assert chosen(ranks, 2, replace(cfg, resume=str(newest))) == (newest, [])
    flip(newest / "__1_0.distcp", 70)
    for asked in (run, newest):
        answer, lines = chosen(ranks, 2, replace(cfg, resume=str(asked)))
        assert answer.startswith(f"UserError: {newest} is damaged (__1_0.distcp: ") and not lines
    assert names(run) == ["step-1", "step-2"]


# -------------------------------------------------------------------------------------------------
# Where to begin


def test_the_rules_of_resume(ranks, tmp_path):
    run = tmp_path / "run"
    cfg = replace(RUN, run_dir=str(run), max_steps=20)
    for asked in ("auto", "again", "never"):
        assert chosen(ranks, 2, replace(cfg, resume=asked)) == (None, [])
    paths = [made_up(run, step) for step in (9, 10)]
    for asked in ("auto", "again"):
        assert chosen(ranks, 2, replace(cfg, resume=asked)) == (paths[1], [])
    for asked, words in [
        ("never", f"{run} holds {paths[1]}: set --resume=auto"),
        (str(paths[0]), f"{run} holds {paths[1]}, which is later than {paths[0]}"),
        (str(tmp_path), "no checkpoint in"),
    ]:
        answer, _ = chosen(ranks, 2, replace(cfg, resume=asked))
        assert answer.startswith(f"UserError: {words}")
    elsewhere = replace(cfg, run_dir=str(tmp_path / "other"), resume=str(paths[0]))
    assert chosen(ranks, 2, elsewhere) == (paths[0], [])
    assert names(run) == ["step-10", "step-9"]
    finished = replace(cfg, max_steps=10)
    assert chosen(ranks, 2, finished) == (paths[1], [])
    answer, (line,) = chosen(ranks, 2, replace(finished, resume="again"))
    assert answer is None and f"{run}-1" in line
    assert names(tmp_path / "run-1") == ["step-10", "step-9"]


def test_a_run_that_was_imported_does_not_start_anew_without_its_weights(ranks, tmp_path):
    run = tmp_path / "run"
    for step in (0, 5, 10):
        made_up(run, step)
    cfg = replace(RUN, run_dir=str(run), max_steps=20, resume="again")
    assert chosen(ranks, 1, cfg)[0].name == "step-10"  # not finished
    flip(run / "checkpoints/step-10/meta.json", 5)
    answer, _ = chosen(ranks, 2, replace(cfg, max_steps=5))
    assert answer.startswith(f"UserError: {run} began from weights that were imported")
    assert names(run) == ["step-0", "step-10", "step-5"]
    answer, lines = chosen(ranks, 1, replace(cfg, max_steps=5, skip_steps="2:3"))
    assert answer.name == "step-0" and lines[0].endswith("resuming from step-0")


@pytest.mark.parametrize(
    "skip, usable",
    [
        ("", 160),  # of 100, 119, 120, 130, and 160, which has skipped 140:150
        ("160:170", 130),
        ("161:170", 160),
        ("142:145", 160),
        ("140:150,155:158", 130),
        ("140:151", 130),
        ("139:150", 130),
        ("130:133", 120),
        ("120:140", 119),
        ("120:140,101:102", 100),
        ("100:101", None),
        ("1:2", None),
    ],
)
def test_steps_to_skip_are_skipped_from_before_them(ranks, tmp_path, skip, usable):
    """Step n of skip_steps is the n-th update, which checkpoint n has seen and n - 1 has not."""
    for step in (100, 119, 120, 130):
        made_up(tmp_path, step, skip_steps="")
    made_up(tmp_path, 160, skip_steps="140:150")
    cfg = replace(RUN, run_dir=str(tmp_path), max_steps=200, skip_steps=skip)
    answer, lines = chosen(ranks, 1, cfg)
    assert answer == (usable and tmp_path / "checkpoints" / f"step-{usable}")
    replaced = [step for step in (160, 130, 120, 119, 100) if step > (usable or 0)]
    end = f"resuming from step-{usable}" if usable else "starting a new run"
    assert len(lines) == len(replaced)
    for step, line in zip(replaced, lines, strict=True):
        assert f"--skip_steps={skip} " in line
        assert line.endswith(f"it is kept as step-{step}.replaced, {end}")
    assert len(checkpoint.complete(tmp_path / "checkpoints")) == 5 - len(replaced)


@pytest.mark.parametrize("by", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restart_goes_on_whatever_the_first_start_was_asked(ranks, tmp_path, by):
    """The first start has done what --resume asked for. A finished run is not moved aside."""
    run, old = tmp_path / "run", made_up(tmp_path / "old", 3)
    cfg = replace(RUN, run_dir=str(run), max_steps=9)
    ((answer, _),) = ranks(1)(choose_again, replace(cfg, resume=str(old)), by)
    assert answer == old  # not done yet
    for asked in ("never", "again", str(old)):
        asking = replace(cfg, resume=asked)
        if asked != "again":
            newest = made_up(run, 9 if asked == "never" else 10)
            assert chosen(ranks, 1, asking)[0].startswith("UserError: ")
        ((answer, _),) = ranks(1)(choose_again, asking, by)
        assert answer == newest


def begun(run, asked, resumed):
    """Write down that a start with --resume=`asked` began at `resumed`; None: not written yet."""
    cfg = TrainConfig(resume=asked or "auto")
    world = SimpleNamespace(global_size=1, device=torch.device("cpu"))
    launch = runlog.launch_record(cfg, world, "fp32", resumed, epoch_tokens=9)
    launch["first_step"] = int(resumed.name.removeprefix("step-"))
    if asked is None:  # as earlier versions did
        del launch["resume"]
    Path(run).mkdir(exist_ok=True)
    runlog.add_line(Path(run) / "launches.jsonl", launch)


def test_a_checkpoint_is_named_to_begin_there_and_not_to_go_back(ranks, tmp_path):
    """The same command goes on from what it has saved since; or begins there if that is damaged."""
    old, run = made_up(tmp_path / "old", 6), tmp_path / "run"
    cfg = replace(RUN, run_dir=str(run), resume=str(old), max_steps=20)
    assert chosen(ranks, 2, cfg) == (old, [])
    begun(run, str(old), old)
    assert chosen(ranks, 2, cfg) == (old, [])  # nothing is saved yet
    newer = [made_up(run, step) for step in (8, 10)]
    assert chosen(ranks, 2, cfg) == (newer[1], [])
    begun(run, "auto", newer[1])
    for path in newer:
        flip(path / "meta.json", 5)
    answer, lines = chosen(ranks, 2, cfg)
    assert answer == old and len(lines) == 2
    assert all(line.endswith(", resuming from step-6") for line in lines)

    other = tmp_path / "other"
    made_up(other, 4)  # of an earlier start
    begun(other, str(old), old)
    assert chosen(ranks, 2, replace(cfg, run_dir=str(other))) == (old, [])


@pytest.mark.parametrize("asked", ["auto", None])
def test_a_run_does_not_go_on_where_it_was_asked_to_go_back(ranks, tmp_path, asked):
    """It has begun at step-6 once, as any start does; nobody had asked for that."""
    earlier, newest = made_up(tmp_path / "run", 6), made_up(tmp_path / "run", 8)
    begun(tmp_path / "run", asked, earlier)
    cfg = replace(RUN, run_dir=str(tmp_path / "run"), resume=str(earlier), max_steps=20)
    answer, _ = chosen(ranks, 1, cfg)
    assert f"holds {newest}, which is later than {earlier}: set --resume=auto" in answer


def otherwise(value):
    """Another value of a setting."""
    if isinstance(value, bool):
        return not value
    return f"{value}x" if isinstance(value, str) else 2 * (value or 4)


# Settings that decide the weights at the end of a run.
DECISIVE = """
    lr schedule warmup_steps alpha_f lr_one_step_late beta1 beta2 adam_eps decoupled_weight_decay
    grad_clip z_loss max_steps init_from precision resid_pdrop
""".split()


@pytest.mark.parametrize("name", DECISIVE)
def test_a_finished_run_says_so_unless_it_would_be_another_one(name):
    """What decides the weights at its end counts; how the ranks share the work does not."""
    cfg = replace(RUN, max_steps=9)
    meta = {"step": 9, **META, **asdict(cfg), "precision": "bf16"}
    start = resume.Start(Path("a/checkpoints/step-9"), meta, "")
    layout = {"sharding": "DDP", "tp": 2, "microbatch_size": "auto", "compile": True}
    same = replace(cfg, **layout, keep_last=9, precision="auto")
    line = resume.finished(start, MODEL, same)
    assert "step-9 has all 9 steps" in line and "--resume=again" in line

    other = otherwise((vars(MODEL) | vars(cfg))[name])
    changed = [replace(c, **{name: other}) if name in vars(c) else c for c in (MODEL, same)]
    with pytest.raises(UserError, match=rf"another run: {name} .* \(here {other}\)"):
        resume.finished(start, *changed)


def choose_again(world, cfg, by="TORCHELASTIC_RESTART_COUNT"):
    """`choose` in a start of a launcher that starts a failed run again."""
    with mock.patch.dict(os.environ, {by: "1"}):
        return choose(world, cfg)


def test_a_restart_without_a_sound_checkpoint_does_not_start_anew(ranks, two_saved, tmp_path):
    """Nobody is watching, so it must not begin at step 0. A typed command may: its user sees it."""
    run = shutil.copytree(two_saved, tmp_path / "run")
    cfg = replace(RUN, run_dir=str(run))
    for name in ("step-1", "step-2"):
        flip(run / "checkpoints" / name / "__0_0.distcp", 70)
    for _ in range(2):  # nothing has changed, so the next restart refuses as well
        for answer, lines in ranks(2)(choose_again, cfg):
            assert answer.startswith(f"UserError: {run} has no sound checkpoint") and not lines
        assert names(run) == ["step-1", "step-2"]
    answer, lines = chosen(ranks, 2, cfg)
    assert answer is None and len(lines) == 2 and names(run) == ["step-1.damaged", "step-2.damaged"]


@pytest.fixture
def anyones():
    """A folder that all users can reach."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def without_privilege():
    """As an ordinary user, whom permissions stop."""
    if os.getuid():
        yield
        return
    codecs.lookup("utf-8-sig")  # import it now: Python may lie where others cannot read
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


NOBODY = 65534


def choose_as_anyone(world, cfg):
    with without_privilege():
        return choose(world, cfg)


@pytest.mark.parametrize("hidden", ["", "step-2/__1_0.distcp", "step-2/checksums.json"])
def test_what_may_not_be_read_is_neither_absent_nor_damaged(ranks, two_saved, anyones, hidden):
    run = shutil.copytree(two_saved, anyones / "run")
    for folder in (run, run / "checkpoints"):
        folder.chmod(0o777)  # so a checkpoint could be given another name
    path = run / "checkpoints" / hidden
    before = path.stat().st_mode
    path.chmod(0)
    answers = ranks(2)(choose_as_anyone, replace(RUN, run_dir=str(run)))
    path.chmod(before)
    for answer, lines in answers:
        assert answer.startswith("UserError: ") and "Permission denied" in answer and not lines
        assert str(run / "checkpoints") in answer
    assert names(run) == ["step-1", "step-2"]


def check_program(world, folder):
    """The exit status of lifecycle/resume.py, and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            resume.demonstrate([str(folder)])
        except (SystemExit, UserError) as leaving:
            return getattr(leaving, "code", 2), printed.getvalue() or str(leaving)
    return 0, printed.getvalue()


def test_the_program_says_whether_all_are_sound(ranks, two_saved, tmp_path):
    run = shutil.copytree(two_saved, tmp_path / "run")
    (run / "checkpoints/step-²").mkdir()
    lines = [f"{run}/checkpoints/step-{n}: sound\n" for n in (1, 2)]
    assert ranks(1)(check_program, run) == [(0, "".join(lines))]
    flip(run / "checkpoints/step-1/__0_0.distcp", 70)
    lines[0] = f"{run}/checkpoints/step-1: __0_0.distcp: checksum differs\n"
    assert ranks(1)(check_program, run) == [(1, "".join(lines))]
    assert [status for status, _ in ranks(2)(check_program, run)] == [1, 1]
    ((status, text),) = ranks(1)(check_program, tmp_path)
    assert status == 2 and text.startswith("no checkpoint in")


def unreadable(world, path):
    """What verify raises if one rank does not see the folder, as on a node without the mount."""
    hidden = path if world.global_rank == 0 else path.with_name("elsewhere")
    fault = checkpoint_files.fault
    looking_there = mock.patch.object(
        checkpoint_files, "fault", lambda file, *rest: fault(hidden / file.name, *rest)
    )
    with looking_there, pytest.raises(UserError) as error:
        checkpoint.verify(path)
    return str(error.value)


def test_a_node_that_does_not_see_the_folder_is_no_damage(ranks, two_saved):
    path = two_saved / "checkpoints/step-2"
    (answer,) = set(ranks(2)(unreadable, path))
    assert re.fullmatch(rf"rank 1 on \S+ cannot read {path}: No such file or directory", answer)


def test_damage_and_steps_to_skip_together(ranks, tmp_path):
    paths = {step: made_up(tmp_path, step) for step in (5, 10, 15, 20)}
    (paths[10] / "meta.json").unlink()
    cfg = replace(RUN, run_dir=str(tmp_path), max_steps=20, skip_steps="13:14", resume="again")
    answer, lines = chosen(ranks, 2, cfg)
    assert answer == paths[5] and len(lines) == 3
    assert names(tmp_path) == ["step-10.damaged", "step-15.replaced", "step-20.replaced", "step-5"]
    old = made_up(tmp_path / "old", 15)
    elsewhere = replace(cfg, run_dir=str(tmp_path / "new"), resume=str(old))
    assert chosen(ranks, 2, elsewhere)[0].startswith(f"UserError: {old} was trained on")


# -------------------------------------------------------------------------------------------------
# Whether it fits


def test_a_checkpoint_from_before_a_setting_had_its_default():
    old = {name: value for name, value in META.items() if not name.startswith("rope")}
    resume.check_same(Path("x"), old, MODEL, RUN, "f00")
    with pytest.raises(UserError, match=r"another model: rope False \(here True\)"):
        resume.check_same(Path("x"), old, replace(MODEL, rope=True), RUN, "f00")


FREE = {"attn_impl", "norm_type", "emb_pdrop", "attn_pdrop", "resid_pdrop"}


@pytest.mark.parametrize("key", sorted(set(MPTConfig.__dataclass_fields__) - FREE))
def test_another_model_is_refused_by_name(key):
    other = otherwise(getattr(MODEL, key))
    with pytest.raises(UserError, match=rf"another model: {key} .* \(here {other}\)"):
        resume.check_same(Path("x"), META, replace(MODEL, **{key: other}), RUN, "f00")


@pytest.mark.parametrize(
    "change, fingerprint, names",
    [
        ({"seed": 3}, "f00", "seed 1337 (here 3)"),
        ({"global_batch_size": 24}, "f00", "global_batch_size 12 (here 24)"),
        ({"seed": 3}, "ba2", "seed 1337 (here 3), data f00 (here ba2)"),
    ],
)
def test_another_order_of_the_data_is_refused_by_name(change, fingerprint, names):
    with pytest.raises(UserError) as caught:
        resume.check_same(Path("x"), META, MODEL, replace(RUN, **change), fingerprint)
    assert names in str(caught.value)


def test_an_imported_run_says_how_to_begin_from_it():
    imported = META | {"data_fingerprint": "imported from mpt-7b"}
    with pytest.raises(UserError, match="imported from mpt-7b.*--init_from=runs/b "):
        resume.check_same(Path("runs/b/checkpoints/step-0"), imported, MODEL, RUN, "f00")


def test_imported_adapters_go_on_with_any_data_but_not_as_other_adapters():
    adapters = {"init_from": "base", "lora_rank": 4}
    trained = META | adapters
    imported = trained | {"data_fingerprint": "imported from theirs"}
    here = replace(RUN, **adapters, lora_dropout=0.1, seed=3, global_batch_size=24)
    resume.check_same(Path("x"), imported, MODEL, here, "ba2")
    with pytest.raises(UserError, match=r"in another order: seed 1337 \(here 3\)"):
        resume.check_same(Path("x"), trained, MODEL, here, "ba2")
    for change, words in [
        ({"lora_rank": 8}, r"lora_rank 4 \(here 8\)\."),
        ({"lora_rank": 0}, r"lora_rank 4 \(here 0\)\."),
        ({"lora_alpha": 4.0}, r"lora_alpha 16.0 \(here 4.0\)\."),
        ({"lora_train": "norms"}, r"lora_train  \(here norms\)\."),
    ]:
        with pytest.raises(UserError, match=f"trained with other adapters: {words}"):
            resume.check_same(Path("x"), imported, MODEL, replace(here, **change), "ba2")


def test_imported_adapters_train_on_packed_rows_of_another_length():
    saved = replace(MODEL, alibi=True)
    adapters = {"init_from": "base", "lora_rank": 4}
    imported = META | asdict(saved) | adapters | {"data_fingerprint": "imported from theirs"}
    run = replace(RUN, **adapters)
    here = replace(saved, attn_uses_sequence_id=True, max_seq_len=16, learned_pos_emb=False)
    resume.check_same(Path("x"), imported, here, run, "ba2")
    trained = imported | {"data_fingerprint": "f00"}
    with pytest.raises(UserError, match=r"another model: max_seq_len \d+ \(here 16\)"):
        resume.check_same(Path("x"), trained, replace(saved, max_seq_len=16), run, "f00")
    for other in (replace(here, clip_qkv=6.0), replace(here, rope=True, alibi=False)):
        with pytest.raises(UserError, match="x is of another model: "):
            resume.check_same(Path("x"), imported, other, run, "ba2")
    learned = imported | asdict(replace(saved, alibi=False, learned_pos_emb=True))
    here = replace(saved, alibi=False, learned_pos_emb=True, max_seq_len=16)
    with pytest.raises(UserError, match=r"another model: max_seq_len \d+ \(here 16\)"):
        resume.check_same(Path("x"), learned, here, run, "ba2")


def test_what_may_change_may_change():
    dropout = {"attn_pdrop": 0.1, "emb_pdrop": 0.1, "resid_pdrop": 0.1}
    model = replace(MODEL, attn_impl="sdpa", norm_type="layernorm", **dropout)
    how = {"microbatch_size": 1, "lr": 1.0, "max_steps": 77, "sharding": "DDP", "run_dir": "y"}
    resume.check_same(Path("x"), META, model, TrainConfig(global_batch_size=12, **how), "f00")


def test_another_norm_is_another_model_but_not_the_same_in_another_precision():
    meta = META | {"norm_type": "low_precision_rmsnorm"}
    resume.check_same(Path("x"), meta, replace(MODEL, norm_type="rmsnorm"), RUN, "f00")
    with pytest.raises(UserError, match="another model: norm_type"):
        resume.check_same(Path("x"), meta, replace(MODEL, norm_type="layernorm"), RUN, "f00")

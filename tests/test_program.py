"""Every program: --help, wrong usage, missing run folders, and output whose reader is gone."""

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, rooms_on_path, words_of
from forks import Forks

import program

FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
LIGHT = ["config.py", "install.py", "flops.py", "plan.py"]  # without torch: 0.1 s


def programs() -> dict:
    """What a user types after `python` or `python -m` -> the file that it runs."""
    files = {path.name: path for path in sorted(ROOT.glob("*.py"))}
    for folder in FOLDERS:
        separator = " " if folder == "bench" else "."
        for path in sorted((ROOT / folder).glob("[a-z]*.py")):
            files[f"{folder}{separator}{path.stem}"] = path
        if (ROOT / folder / "__main__.py").exists():
            files[folder] = ROOT / folder / "__main__.py"
    return {name: path for name, path in files.items() if "\nif __name__ ==" in path.read_text()}


# One stands alone and has no flags; the others are started by program.answer_apart.
OTHERS = ("nano.py", "serving.grammar", "web.files", "web.settings")
PROGRAMS = {name: path for name, path in programs().items() if name not in OTHERS}

ASCII = {"PYTHONIOENCODING": "ascii"}  # the terminal cannot show other letters

# What a pod of a cluster or a job of SLURM has in every shell: programs without ranks do not care.
LEFT_BEHIND = {"RANK": "1", "WORLD_SIZE": "", "SLURM_PROCID": "1", "SLURM_NTASKS": "x"}


def run(words, folder, read=True):
    """A program as a user starts it: (exit status, output, errors).

    read=False: the reader of its output is gone.
    """
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *words_of(words[0]), *words[1:]]
    env = rooms_on_path() | LEFT_BEHIND | {"PYTHONUNBUFFERED": ""}
    options = {"cwd": folder, "env": env, "text": True}
    options |= {"stdout": subprocess.PIPE if read else writer, "stderr": subprocess.PIPE}
    done = subprocess.run(command, **options)
    os.close(writer)
    return done.returncode, done.stdout or "", done.stderr


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """`forked(words, read)` is `run` in a fork, on a terminal that has ASCII only."""
    folder = tmp_path_factory.mktemp("programs")
    forks = Forks(ROOT, **ASCII)
    yield lambda words, read=True: forks([*words_of(words[0]), *words[1:]], folder, read)
    forks.stop()


def is_help(answer, name):
    """Whether the answer shows the first line of the program's docstring."""
    status, out, err = answer
    first_line = PROGRAMS[name].read_text().split('"""')[1].strip().splitlines()[0]
    return status == 0 and first_line.replace("\\", "") in out.replace("\\", "") and err == ""


def is_one_line(answer):
    """Whether the answer is a user error: status 2 and one line on standard error."""
    status, out, err = answer
    return status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("name", LIGHT)
def test_light_programs_help_complain_and_end_quietly(name, tmp_path):
    assert is_help(run([name, "--help"], tmp_path), name)
    wrong = run([name, "--nonsense"], tmp_path)
    assert is_one_line(wrong), wrong
    assert run([name, "-h"], tmp_path, read=False) == (141, "", "")


def test_little_output_whose_reader_is_gone_ends_quietly_too(tmp_path):
    """It stays in the buffer until the program has ended."""
    assert run(["config.py"], tmp_path, read=False) == (141, "", "")


needs_dev_full = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="only Linux has this device, which is always full"
)


def test_a_name_that_the_terminal_cannot_show_is_escaped():
    words = "from lifecycle import stopping; stopping.while_loading(['--run_dir=runs/ü'])"
    options = {"cwd": ROOT, "env": rooms_on_path() | ASCII, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", words], **options)
    assert (done.returncode, done.stderr) == (0, "") and "runs/\\xfc" in done.stdout


@needs_dev_full
def test_output_to_a_full_disk_is_one_line_and_status_2(tmp_path):
    """Even where the error itself cannot be written, as with `>log 2>&1`."""
    with open("/dev/full", "w") as full:
        for errors in (subprocess.PIPE, full):
            command = [sys.executable, ROOT / "config.py"]
            done = subprocess.run(command, stdout=full, stderr=errors, text=True, cwd=tmp_path)
            assert done.returncode == 2
            assert errors is full or "No space left" in done.stderr


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_output_is_no_bug(closed):
    command = f"{sys.executable} config.py configs/demo.py {closed}>&- {3 - int(closed)}>/dev/null"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_helps_and_complains(name, forked):
    assert is_help(forked([name, "--help"]), name)
    wrong = forked([name, "--nonsense"])
    assert is_one_line(wrong), wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp_train.py", "bench train", "lessons"])
def test_a_program_whose_reader_is_gone_ends_quietly(name, forked):
    assert forked([name, "-h"], read=False) == (141, "", "")


# A command -> words of its error: how to use it, or the missing file or folder.
WRONG = {
    "generate.py": "usage: python ",
    "planning.calibrate": "usage: python ",
    "storage.files": "usage: python ",
    "bench": "usage: python ",
    "generate.py nowhere": "nowhere",
    "weights.hf import nowhere out": "nowhere",
    "lifecycle.runlog nowhere": "nowhere",
    "lifecycle.resume nowhere": "nowhere",
    "evaluation nowhere --tasks={words}": "nowhere",
    "weights.tensor_files nowhere": "nowhere",
    "text.shards nowhere.bin": "nowhere.bin",
    "bench compare nowhere.csv": "nowhere.csv",
    "plan.py --device=mi250 --calibrate=nowhere.json": "nowhere.json",
    "text.tokenizer nowhere/tokenizer.json": "nowhere/tokenizer.json",
    "fsdp_train.py configs/nowhere.py": "nowhere.py",
    "fsdp_train.py --init_from=nowhere --data_dir={data}": "nowhere",
    "data.py --dataset=nowhere.txt --tokenizer=bytes": "nowhere.txt",
    "lessons.elastic nowhere.py": "nowhere.py",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", WRONG)
def test_what_is_missing_is_named_in_one_line(command, forked, tmp_path, tiny_data):
    question = {"query": "the", "choices": ["river", "tree"], "gold": 0}
    (tmp_path / "words.jsonl").write_text(json.dumps(question) + "\n")
    words = command.format(words=tmp_path / "words.jsonl", data=tiny_data).split()
    if "{data}" in command:
        made = json.loads((tiny_data / "dataset.json").read_text())
        words += [f"--dataset={made['dataset']}", "--tokenizer=bytes"]
    status, out, err = forked(words)
    lines = [line for line in err.splitlines() if line and not line.startswith("tokens: ")]
    out = re.sub("^runs/mpt: loading PyTorch.*\n", "", out)  # fsdp_train.py prints it first
    answer = status, out, "\n".join(lines) + "\n"
    assert is_one_line(answer) and WRONG[command] in answer[2], answer


def test_the_number_of_arguments():
    assert program.arguments(["a"], "RUN_DIR") == ["a"]
    assert program.arguments([], "[OUT.png]") == []
    assert program.arguments(["a", "b"], "FILE ...") == ["a", "b"]
    refused = [(["a", "b"], "[OUT.png]"), ([], "FILE ..."), (["--a"], "FILE ..."), (["a"], "")]
    for argv, names in refused:
        with pytest.raises(program.UserError, match="usage: python"):
            program.arguments(argv, names)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another OpenMP")
@pytest.mark.parametrize("words", ["fsdp_train.py", "generate.py", "-m evaluation"])
def test_waiting_threads_sleep_soon(words):
    """OpenMP says what it was told. Polling makes a step on a busy machine 10 times as long."""
    environment = {**os.environ, "OMP_DISPLAY_ENV": "VERBOSE"}
    environment.pop("GOMP_SPINCOUNT", None)  # the Makefile's
    command = [sys.executable, *words.split(), "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr


# --------------------------------------------------------------------------------------------------
# The launcher's variables


def environment(text: str) -> dict[str, str]:
    """The variables in "NAME=value ..."; {S} is short for SLURM."""
    return dict(word.split("=") for word in text.replace("{S}", "SLURM").split())


STEP = "{S}_STEP_ID=0 {S}_PROCID=3 {S}_LOCALID=1 {S}_NTASKS=4 {S}_NNODES=2"


@pytest.mark.parametrize(
    "variables, expected",
    [
        ("", (0, 1, 0, 1)),
        ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", (3, 4, 1, 2)),
        (f"RANK=0 WORLD_SIZE=2 {STEP} OMPI_COMM_WORLD_SIZE=x", (0, 2, 0, 1)),  # torchrun in a step
        (STEP, (3, 4, 1, 2)),
        ("{S}_STEP_ID=0 {S}_PROCID=0 {S}_NTASKS=4 {S}_STEP_NUM_TASKS=1", (0, 1, 0, 1)),
        ("{S}_PROCID=1", (0, 1, 0, 1)),  # left in a shell
        ("LOCAL_RANK=3 LOCAL_WORLD_SIZE=x MASTER_PORT=", (0, 1, 0, 1)),
        ("RANK=1", "RANK=1"),
        ("RANK=4 WORLD_SIZE=4", "RANK=4, WORLD_SIZE=4"),
        ("RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK=2"),
        ("WORLD_SIZE=4", "WORLD_SIZE=4: start with srun or torchrun"),
        ("{S}_PROCID=0 {S}_LOCALID=0 {S}_NTASKS=4", "SLURM_NTASKS=4: start with srun or torchrun"),
        ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=2: start with srun or torchrun"),
        ("{S}_STEP_ID=0 {S}_PROCID=0 {S}_NTASKS=2", "SLURM_LOCALID is not set"),
        (f"{STEP} {{S}}_STEP_NUM_TASKS=3", "SLURM_PROCID=3"),
    ],
)
def test_a_rank_knows_its_place_or_names_the_variable(monkeypatch, variables, expected):
    """(global rank, global size, local rank, local size); words: those of the error."""
    monkeypatch.setattr(os, "environ", environment(variables))
    if isinstance(expected, tuple):
        assert program.read_launcher() == expected and program.rank() == expected[0]
        return
    with pytest.raises(program.UserError) as raised:
        program.read_launcher()
    assert expected in str(raised.value) and "start with" in str(raised.value)
    assert program.rank() == 0  # and prints it


def test_a_program_without_ranks_is_none_and_starts_none(monkeypatch, capsys):
    """Whatever else it sets, a launcher may have left these."""
    seen = []

    def main(argv):
        seen.append((program.read_launcher(), [name for name in os.environ if "RANK" in name]))
        raise program.UserError("a mistake")

    monkeypatch.setattr(os, "environ", environment(f"RANK=1 WORLD_SIZE=2 LOCAL_RANK=x {STEP}"))
    with pytest.raises(SystemExit, match="2"):
        program.run(main)
    assert seen == [((0, 1, 0, 1), [])]
    assert capsys.readouterr().err == "error: a mistake\n"


def test_a_table_aligns_words_to_the_left_and_numbers_to_the_right():
    rows = [["ours", 1234, "1.5 GB"], ["transformers", 12, "-"]]
    assert program.table(["name", "tokens/s", "memory"], rows).splitlines() == [
        "name          tokens/s  memory",
        "ours              1234  1.5 GB",
        "transformers        12       -",
    ]

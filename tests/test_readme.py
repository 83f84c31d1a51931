"""Every command of README.md, TROUBLE.md and the pages of the rooms is run, small, in a copy of the project."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment

from config import MPTConfig
from model import MPT
from weights import hf

README = (ROOT / "README.md").read_text()
PAGES = README + (ROOT / "TROUBLE.md").read_text()
ROOMS = "".join(path.read_text() for path in sorted(ROOT.glob("[a-z]*/README.md")))


def lines_of(page: str) -> list[str]:
    """The lines of its blocks of commands."""
    return "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).splitlines()


def commands_in(lines: list[str]) -> set[str]:
    """Without comments and empty lines."""
    return {line.partition("  #")[0].strip() for line in lines} - {""}


BLOCKS = lines_of(PAGES)
INLINE = re.findall(r"`((?:python|torchrun) [^`]+)`", PAGES)
COMMANDS = sorted(commands_in(BLOCKS + INLINE))

# Flags come last, so these shrink any run: a model of some thousand weights, two steps, text that is here.
SMALL = (
    "--d_model=32 --n_heads=4 --n_layers=2 --vocab_size=320 --max_seq_len=32 --dataset=my/*.txt --tokenizer=bytes "
    "--data_dir=data/small --val_fraction=0.1 --max_tokens=0 --eval_tokens=64 --max_steps=2 --warmup_steps=1 "
    "--global_batch_size=8 --microbatch_size=2 --icl_limit=1 --save_interval=1"
).split()


def shrunk(command: str) -> list[str]:
    """The command with this Python, and small."""
    command = command.replace("step-3000", "step-1").replace(
        "3110:3130", "2:3"
    )  # the run that is here has 2 steps
    words = shlex.split(command)
    module = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
    small = []
    if "--help" not in words and any(program in words for program in ("fsdp_train.py", "data.py")):
        small = [*SMALL, "--max_steps=3"] if "--skip_steps=2:3" in words else SMALL
    if "bench" in words:
        small = {
            "attention": "--d_model=32 --head_dims=16 --tokens=32 --lengths=32 --rounds=1 --turn_ms=1 --out=.".split(),
            "train": [*SMALL[:5], "--n_layers=1", "--rounds=1", "--steps=1"],
            "machine": ["--seconds=0.01"],
        }.get(words[words.index("bench") + 1], [])
    return [sys.executable, *module, *words[1:], *small]


def run(command, folder, timeout=240):
    return subprocess.run(
        command,
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory, tiny_text):
    """The project's files in another folder, with some text in my/ and a run in runs/demo."""
    folder = tmp_path_factory.mktemp("readme") / "project"
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(".*", "data", "runs", "__pycache__")
    )
    shutil.copytree(tiny_text, folder / "my")
    shutil.copy(folder / "my/0.txt", folder / "my/notes.txt")
    done = run(shrunk("python fsdp_train.py configs/demo.py"), folder)
    assert done.returncode == 0, done.stderr
    done = run(
        shrunk("python -m bench train --out=scaling.csv"), folder
    )  # for the commands that read such rows
    assert done.returncode == 0, done.stderr
    for name in ("one", "two", "moved"):  # as of make elastic
        shutil.copytree(folder / "runs/demo", folder / "runs/elastic" / name)
    row = json.dumps({"query": "the", "choices": ["river", "tree"], "gold": 0})
    (folder / "words.jsonl").write_text(f"{row}\n")
    cfg = MPTConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=320, max_seq_len=32, alibi=True, no_bias=True
    )
    hf.export(MPT(cfg), folder / "mpt-7b")  # as small as the commands are made here
    settings = json.loads((folder / "mpt-7b/config.json").read_text())
    (folder / "mpt-7b/config.json").write_text(json.dumps(settings | {"tokenizer_name": "bytes"}))
    for name in ("mi250.csv", "h100.csv"):
        shutil.copy(folder / "scaling.csv", folder / name)
    return folder


def test_the_readme_has_the_two_commands_first():
    assert [line.split("  #")[0].strip() for line in BLOCKS[:2]] == ["make train", "make test"]
    assert len(README.splitlines()) <= 250


# Commands without torch, and the first run on one's own text. The others take 2 s and more.
QUICK = (
    "plan.py",
    "planning.",
    "flops.py",
    "lifecycle.lease",
    "storage.files",
    "bench compare",
    "--dataset='my/*.txt'",
)


def marked(command):
    quick = any(words in command for words in QUICK)
    return pytest.param(command, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(
    "command", [marked(c) for c in COMMANDS if c.split()[0] in ("python", "torchrun")]
)
def test_command(command, copy):
    done = run(shrunk(command), copy)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


# Of the pages of rooms: what is tested elsewhere, or cannot run here.
ELSEWHERE = {
    "make elastic": "tests/lessons/test_elastic.py",
    "python -m lessons.elastic --max_steps=120": "tests/lessons/test_elastic.py",
    "python -m gpu_kernels.flash_attention --tune": "it needs a GPU",
    "python -m planning.calibrate results.csv --device=mi250": "refuses rows of a CPU: test_calibrate.py",
    "torchrun --nproc_per_node 2 -m lifecycle.watchdog": "ends with an error: tests/lifecycle/test_watchdog.py",
}
# What stands on those pages for a reader's own file or run.
STANDS_FOR = {
    "results.csv": "scaling.csv",
    "mine.csv theirs.csv": "mi250.csv h100.csv",
    "demo-hf": "mpt-7b",
    "runs/mpt-7b": "runs/from-mpt-7b",
    "step-200": "step-1",
    "data/stdlib-bpe-4096/*.bin": "data/small/train-00000.bin",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(commands_in(lines_of(ROOMS)) - set(COMMANDS)))
def test_command_of_a_room(command, copy):
    if command in ELSEWHERE:
        pytest.skip(ELSEWHERE[command])
    for word, ours in STANDS_FOR.items():
        command = command.replace(word, ours)
    done = run(shrunk(command), copy)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("sbatch")])
def test_slurm_script_parses_and_its_config_is_there(command):
    script, config = re.fullmatch(
        r"sbatch --nodes=\d+ (slurm/\S+) (configs/\S+).*", command
    ).groups()
    assert (ROOT / config).exists()
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    named = re.findall(r"configs/\w+\.py", (ROOT / script).read_text())
    assert named and all((ROOT / name).exists() for name in named)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_knows_the_target(command):
    done = run([*command.split(), "--dry-run"], ROOT)
    assert done.returncode == 0 and "install.py" in done.stdout, done.stderr


def test_no_command_is_left_out():
    assert {c.split()[0] for c in COMMANDS} <= {"python", "torchrun", "sbatch", "make"}


def test_every_file_that_the_readme_names_is_there():
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|md|txt|sbatch))[`: ]", README)
    assert len(named) > 15 and all((ROOT / name).exists() for name in named), named
    missing = [p.name for p in ROOT.glob("*.py") if f"`{p.name}`" not in README]
    assert not missing, f"the reading order lacks {missing}"


PAPER = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if ".venv" not in path.parts and path.name != "CHANGES.md"
]


@pytest.mark.parametrize("path", PAPER, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(path):
    """With its folder, from the root or from the page; a name alone in code may be anybody's."""
    page = path.read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+[a-z]\w*\.(?:py|md|sbatch|png|csv))`", page) + re.findall(
        r"\]\(([\w./]+)\)", page
    )
    users = ("runs/", "my/", "data/")
    missing = [
        name
        for name in named
        if not name.startswith(users)
        and not (ROOT / name).exists()
        and not (path.parent / name).exists()
    ]
    assert not missing


@pytest.mark.slow
def test_make_train_from_a_clone(copy, tmp_path):
    """The newcomer's command, over the torch that is here, with a short run; twice: the second makes a new run."""
    project = tmp_path / "project"
    shutil.copytree(copy, project, ignore=shutil.ignore_patterns("runs", "data"))
    small = "--max_steps=3 --warmup_steps=1 --eval_tokens=256 --max_tokens=20000"
    for _ in range(2):
        done = run(
            ["make", "train", f"PYTHON={sys.executable}", f"ARGS={small}"], project, timeout=600
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for words in (
        "torchrun --rdzv-backend=c10d",
        "step 3/3",
        "validation loss",
        "before training",
        "step-3",
        "Next",
    ):
        assert words in done.stdout, words
    assert os.path.exists(project / "runs/demo/loss.png") or "needs matplotlib" in done.stdout
    assert os.path.exists(project / "runs/demo-1/metrics.jsonl")

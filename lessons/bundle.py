"""Prepares a folder from which a machine without internet is set up: a classroom, or a run.

    python -m lessons.bundle bundle       or `make bundle`: on one machine, online
    sh bundle/setup.sh ~/workshop         on each laptop, from a copy of that folder (a USB stick)

    bundle/
      project/       this folder, without .venv and runs; of data/ what the config needs: its tokens
                     and tokenizer, so that nobody waits for them; GPT-2's files, if they can be had
      wheels/        the packages that training and the lessons need, torch among them
      setup.sh       copies the project, makes its .venv from the wheels, and runs a first check

A config after the folder (`make bundle ARGS=configs/mpt1b.py`; default: the demo's) brings its own
tokens, and the model that it starts from (init_from). Paths in it must be relative to this folder.

Packages are built for one system, processor and version of Python: those of the machine that makes
the bundle. For a classroom with Macs and Linux, make one on each kind. If the Python of setup.sh
has a torch, as in a container, that one is used: see INSTALL.md.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import config
import install
import program
from program import require
from storage import downloads
from text.prepare import prepare
from text.recipe import of_mixture

ROOT = Path(__file__).parent.parent
LEFT_OUT = (".git", ".*_cache")  # beside what git ignores
SETUP = """\
#!/bin/sh
# sh setup.sh ~/workshop: the workshop, set up from this folder without a network.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
there=${1:?usage: sh setup.sh FOLDER}
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$version" != "VERSION" ]; then
    echo "error: the wheels are for Python VERSION, $python is $version: install it, or put" \\
        "PYTHON=pythonVERSION before your command" >&2
    exit 2
fi
mkdir -p "$there"
there=$(cd "$there" && pwd)
cp -R "$here/project/." "$there"
cd "$here" # pip takes "wheels" from here: a path with a space would be two for it
export PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels
"$python" "$there/install.py" requirements.txt requirements-extra.txt
cd "$there"
.venv/bin/python -m lessons
echo "In $there, to train: .venv/bin/python fsdp_train.py" CONFIG
if [ -d data/tokenizers ]; then
    echo 'With the words of GPT-2: export TIKTOKEN_CACHE_DIR="$PWD/data/tokenizers"'
fi
"""


def main(argv: list[str]) -> None:
    """Make the bundle. What is in it already is used again."""
    name, *given = program.arguments(argv, "FOLDER [CONFIG]")
    path = given[0] if given else "configs/demo.py"
    config.load([path], config.MPTConfig, config.TrainConfig)  # a mistake in it shows at once
    folder = Path(name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    setup = folder / "setup.sh"
    is_ours = setup.exists() and setup.read_text(errors="replace").startswith(SETUP[:60])
    require(is_ours or not any(folder.iterdir()), f"{name} has other files in it: name a new one")
    write_setup(folder, path)
    print(f"1 of 4: the project -> {name}/project", flush=True)
    copy_project(folder)
    print(f"2 of 4: packages -> {name}/wheels", flush=True)
    download_packages(folder / "wheels")
    print(f"3 of 4: GPT-2's tokenizer -> {name}/project/data/tokenizers", flush=True)
    copy_tokenizer(folder / "project" / "data" / "tokenizers")
    print(f"4 of 4: the data of {path} -> {name}/project", flush=True)
    copy_run(path, folder / "project")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    command = program.shell("sh", f"{name}/setup.sh")
    print(f"{name} has {size / 1e6:,.0f} MB. On each machine: {command} ~/workshop")


def write_setup(folder: Path, path: str) -> None:
    """Write setup.sh, which sets up one machine to train with a config."""
    text = SETUP.replace("VERSION", install.python_version())
    typed = program.shell(path)
    (folder / "setup.sh").write_text(text.replace("CONFIG", program.shell(typed)))


def copy_project(folder: Path) -> None:
    """Copy this folder, as it is now, without what each machine makes for itself."""

    ignored = [line.strip("/").rpartition("/")[2] for line in install.lines(".gitignore")]

    def left_out(path, names):
        is_bundle = [name for name in names if Path(path, name).resolve() == folder]
        return {*shutil.ignore_patterns(*LEFT_OUT, *ignored)(path, names), *is_bundle}

    shutil.rmtree(folder / "project", ignore_errors=True)
    shutil.copytree(ROOT, folder / "project", ignore=left_out)


def download_packages(wheels: Path) -> None:
    """Download what requirements.txt and requirements-extra.txt ask for, and triton on Linux.

    torch is the build that `.venv` has: for CPUs, unless an NVIDIA GPU is here.
    """
    pip = [sys.executable, "-m", "pip", "download", "--dest", str(wheels), "-c", "constraints.txt"]
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    index = install.torch_index(True, "/dev", f"{install.PYTORCH}/cpu")
    run(*pip, *(["--index-url", index] if index else []), torch, "setuptools")
    files = ["-r", "requirements.txt", "-r", "requirements-extra.txt"]
    triton = [line for line in install.lines("requirements-dev.txt") if "triton" in line]
    run(*pip, "--find-links", str(wheels), *files, *triton)


def copy_tokenizer(folder: Path) -> None:
    """Copy GPT-2's files. The lessons and prepared tokens do without: a failure is only said."""
    try:
        downloads.gpt2_encoding()
    except (OSError, ValueError):
        print("        not to be had here: --tokenizer=gpt2 will not work")
        return
    folder.mkdir(parents=True)
    for name in downloads.GPT2_FILES:
        shutil.copy(downloads.gpt2_cache() / name, folder)


def copy_run(path: str, project: Path) -> None:
    """Copy what a config needs to train: itself, its tokens, and the model that it starts from."""
    model_cfg, cfg = config.load([path], config.MPTConfig, config.TrainConfig)
    copy_inside(Path(path), project)
    what = cfg, os.cpu_count(), model_cfg.max_seq_len
    for folder in of_mixture(prepare, *what) if cfg.mix else [prepare(*what)]:
        copy_inside(folder, project)
    if cfg.init_from:
        base = Path(cfg.init_from)
        copy_inside(base.parent.parent if base.parent.name == "checkpoints" else base, project)


def copy_inside(path: Path, project: Path) -> None:
    """Copy a file or folder to the same place in the project of the bundle."""
    is_inside = not path.is_absolute() and ".." not in path.parts
    require(is_inside, f"{path} is outside of this folder: the config must name it relative to it")
    (project / path).parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, project / path, dirs_exist_ok=True)
    else:
        shutil.copy(path, project / path)


def run(*command: str) -> None:
    """Run a command in the project's folder. Its failure ends this program."""
    done = subprocess.run(command, cwd=ROOT)
    require(done.returncode == 0, "this step failed (above): mend it, and the same command goes on")


if __name__ == "__main__":
    program.run(main)

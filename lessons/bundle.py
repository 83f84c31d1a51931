"""Prepares a folder from which a classroom is set up without a network.

    python -m lessons.bundle bundle       or `make bundle`: on one machine, online
    sh bundle/setup.sh ~/workshop         on each laptop, from a copy of that folder (a USB stick)

    bundle/
      project/       this folder, without .venv, runs and data
      wheels/        the packages that training and the lessons need, torch among them
      tokenizers/    GPT-2's files for tiktoken, if they can be had here
      data/          the demo's tokens and tokenizer, so that nobody waits for them
      setup.sh       copies the project, makes its .venv from the wheels, and runs a first check

Packages are built for one system, processor and version of Python: those of the machine that makes
the bundle. For a classroom with Macs and Linux, make one on each kind.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import install
import program
from program import require

ROOT = Path(__file__).parent.parent
LEFT_OUT = (".git", ".*_cache")  # beside what git ignores
DATA = "stdlib-bpe-4096"  # the folder in data/ that configs/demo.py reads
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
mkdir -p "$there/data"
there=$(cd "$there" && pwd)
cp -R "$here/project/." "$there"
cp -R "$here/data/." "$there/data"
if [ -d "$here/tokenizers" ]; then
    cp -R "$here/tokenizers" "$there/data"
    echo 'for --tokenizer=gpt2, in this folder: export TIKTOKEN_CACHE_DIR="$PWD/data/tokenizers"'
fi
cd "$here" # pip takes "wheels" from here: a path with a space would be two for it
export PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels
"$python" "$there/install.py" requirements.txt requirements-extra.txt
cd "$there"
.venv/bin/python -m lessons
"""


def main(argv: list[str]) -> None:
    """Make the bundle. What is in it already is used again."""
    (name,) = program.arguments(argv, "FOLDER")
    folder = Path(name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    setup = folder / "setup.sh"
    is_ours = setup.exists() and setup.read_text(errors="replace").startswith(SETUP[:60])
    require(is_ours or not any(folder.iterdir()), f"{name} has other files in it: name a new one")
    write_setup(folder)
    print(f"1 of 4: the project -> {name}/project", flush=True)
    copy_project(folder)
    print(f"2 of 4: packages -> {name}/wheels", flush=True)
    download_packages(folder / "wheels")
    print(f"3 of 4: GPT-2's tokenizer -> {name}/tokenizers", flush=True)
    download_tokenizer(folder / "tokenizers")
    print(f"4 of 4: the demo's data -> {name}/data", flush=True)
    run(sys.executable, "data.py", "configs/demo.py", f"--data_dir={folder / 'data' / DATA}")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    command = program.shell("sh", f"{name}/setup.sh")
    print(f"{name} has {size / 1e6:,.0f} MB. On each laptop: {command} ~/workshop")


def write_setup(folder: Path) -> None:
    """Write setup.sh, which sets up one laptop."""
    (folder / "setup.sh").write_text(SETUP.replace("VERSION", install.python_version()))


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


def download_tokenizer(folder: Path) -> None:
    """Let tiktoken fetch GPT-2's files. The lessons do without: a failure is only said."""
    environment = os.environ | {"TIKTOKEN_CACHE_DIR": str(folder)}
    folder.mkdir(exist_ok=True)
    known = os.environ.get("TIKTOKEN_CACHE_DIR")
    if known and Path(known).is_dir():
        shutil.copytree(known, folder, dirs_exist_ok=True)
    code = "import tiktoken; tiktoken.get_encoding('gpt2')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    if done.returncode:
        shutil.rmtree(folder)
        print("        not to be had here: --tokenizer=gpt2 will not work")


def run(*command: str) -> None:
    """Run a command in the project's folder. Its failure ends this program."""
    done = subprocess.run(command, cwd=ROOT)
    require(done.returncode == 0, "this step failed (above): mend it, and the same command goes on")


if __name__ == "__main__":
    program.run(main)

"""containers/: what can be checked without Docker, and the installing steps in a new Python."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment

DOCKERFILES = sorted((ROOT / "containers").glob("Dockerfile.*"))
APPTAINER = (ROOT / "containers" / "mpt.def").read_text()
EACH = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def instructions(path) -> list[list[str]]:
    """[["FROM", "${BASE}"], ["RUN", "apt-get update && ..."], ...] of a Dockerfile."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M)
    return [line.split(maxsplit=1) for line in text.replace("\\\n", "").splitlines() if line]


def arguments(path, name) -> list[str]:
    """What follows each instruction of this name."""
    return [rest for word, rest in instructions(path) if word == name]


def copied(path) -> list[str]:
    """The files that a Dockerfile copies before it installs."""
    first = arguments(path, "COPY")[0].split()
    assert first[-1] == "./"
    return first[:-1]


def section(name) -> str:
    """A section of the Apptainer definition."""
    return re.search(rf"^%{name}\n((?:    .*\n)+)", APPTAINER, re.M)[1]


def words(shell) -> list[str]:
    return shell.replace("\\\n", " ").split()


@EACH
def test_a_dockerfile_is_sound(path):
    assert arguments(path, "FROM") == ["${BASE}"] and len(arguments(path, "ARG")) == 1
    assert all((ROOT / name).is_file() for name in copied(path))
    for command in arguments(path, "RUN"):
        assert subprocess.run(["bash", "-n"], input=command, text=True).returncode == 0
    linter = Path(sys.executable).with_name("hadolint")
    if linter.exists():  # DL3008: the image decides which version of gcc
        done = subprocess.run([linter, "--ignore=DL3008", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_apptainer_does_what_docker_does():
    """With the same image; for NVIDIA's its comment names the same."""
    cuda, rocm = DOCKERFILES
    for path in DOCKERFILES:
        assert words("cd /opt/mpt") + words(" ".join(arguments(path, "RUN"))) == words(
            section("post")
        )
        assert [line.split()[0] for line in section("files").splitlines()] == copied(path)
        assert f"export {arguments(path, 'ENV')[0]}" == section("environment").strip()
    assert section("arguments").split() == arguments(rocm, "ARG")
    assert f"--build-arg {arguments(cuda, 'ARG')[0]}\n" in APPTAINER
    assert subprocess.run(["bash", "-n"], input=section("post"), text=True).returncode == 0


TORCH = "torch torchgen functorch numpy sympy mpmath networkx jinja2 markupsafe filelock fsspec"
TORCH += " typing_extensions triton"


@pytest.fixture
def image(tmp_path):
    """A Python with torch, without what this project adds, as in vendors' images. Its folder."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "image"], check=True)
    below = Path(sysconfig.get_path("purelib"))
    own = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "image")}))
    names = [name.replace("_", "[-_]") for name in TORCH.split()]
    for name in names:
        for source in [*below.glob(name), *below.glob(f"{name}.*"), *below.glob(f"{name}-*")]:
            (own / source.name).symlink_to(source)
    return tmp_path / "image"


TINY = "--d_model=32 --n_heads=2 --n_layers=1 --vocab_size=320 --max_seq_len=32"
TINY += " --tokenizer=bytes --val_fraction=0.2 --global_batch_size=4 --max_steps=3 --warmup_steps=1"


@pytest.mark.slow
def test_the_installing_steps_end_in_a_python_that_trains(tmp_path, image):
    """The last RUN over a torch that stays as it is; then a run with the code of this folder.

    Of the requirements, those of a small run alone.
    """
    pip = [image / "bin" / "pip", "download", "--no-deps", "--dest", tmp_path, "tqdm"]
    if subprocess.run(pip, capture_output=True).returncode:
        pytest.skip("needs an index of packages")
    path = DOCKERFILES[0]
    build = tmp_path / "build"
    build.mkdir()
    for name in copied(path):
        shutil.copy(ROOT / name, build)
    for name in build.glob("requirements*.txt"):  # the others take a minute; CI installs them all
        kept = re.findall(r"^(?:torch|numpy|tqdm|tiktoken)\b.*\n", name.read_text(), re.M)
        name.write_text("".join(kept))
    env = clean_environment() | {"PATH": f"{image}/bin:{os.environ['PATH']}"}
    env |= {"PIP_NO_COMPILE": "1"}  # 20 s less

    def run(*command, cwd):
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("bash", "-c", arguments(path, "RUN")[-1], cwd=build)
    python = str(build / ".venv/bin/python")
    code = "from importlib.util import find_spec; print(find_spec('torch').origin)"
    assert run(python, "-c", code, cwd="/").startswith(str(image))
    code = code.replace("torch", "tqdm")
    assert run(python, "-c", code, cwd="/").startswith(str(build))
    flags = ["--dataset=text/*.py", *TINY.split()]
    run_dir = [f"--run_dir={tmp_path}/run", f"--data_dir={tmp_path}/data"]
    torchrun = [str(build / ".venv/bin/torchrun"), "--nproc_per_node=1"]
    run(*torchrun, "fsdp_train.py", *flags, *run_dir, cwd=ROOT)
    assert (tmp_path / "run/checkpoints/step-3").exists()

"""containers/: what can be checked without Docker. Its installing step: test_install.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

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

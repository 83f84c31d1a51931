"""The Python environment of this folder, `.venv`: over the torch that is there, or complete, with tested versions.

    the Python in use ...      `.venv` ...                               and pip puts into it
    imports torch >= 2.9       sees that Python's packages               what is missing; torch and triton are held
    does not                   stands alone                              everything, at the versions of constraints.txt

A container, a conda environment or a cluster's module has the torch that fits its driver; losing that to PyPI's torch,
which is NVIDIA's, is the classic way to break an AMD machine. So pip writes to `.venv` only. That works over a
read-only image and Debian's "externally managed" Python too, and `rm -rf .venv` undoes it. (`--system-site-packages`
would show less: from an active venv, not its packages but those of the Python below it. A .pth file names the folders.)
A `.venv` that you made is used with the torch that you put there: that is how to choose a build.

`python install.py requirements.txt` answers in 0.2 s and calls no pip if `.venv` has what that file wants. Exit
status: 0, or 2 with one line that says what to do.
It starts on Python 3.6 too, to say that 3.10 is needed. Read next: Makefile.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(
    VENV, "environment.json"
)  # the name of before, so that an old .venv is recognised
PYTORCH = "https://download.pytorch.org/whl"  # /cpu, /cu126, /rocm7.1: torch's builds
HELD = ("torch", "triton")  # never replaced where they are there


def main(files, dev="/dev", cpu_index=PYTORCH + "/cpu"):
    """Make `.venv` unless there is one for the Python in use; install the requirement files that it lacks.

    dev: the folder of device files; cpu_index: where torch's CPU build is. A mistake is one line and exit status 2.
    """
    if {"--help", "-h"} & set(files):
        print(__doc__.strip())
        return
    if sys.version_info < (3, 10):  # noqa: UP036
        stop(
            f"{sys.executable} is Python {python_version()}, too old: make PYTHON=python3.12, or any from 3.10 on"
        )
    for name in files:
        if not os.path.isfile(os.path.join(ROOT, name)):
            stop(f"no requirement file {name!r} here: python install.py requirements.txt")
    stamp = read_stamp()
    if os.path.realpath(sys.prefix) != os.path.realpath(VENV):  # else `.venv` is active, and right
        below = python_below()
        if stamp["below"] != "yours" and (stamp["below"] != below or not os.path.exists(PYTHON)):
            stamp = make_venv(below)
    if not os.path.exists(PYTHON):
        stop(f"{PYTHON} leads nowhere: rm -rf {VENV}, then make again")
    want = {name: digest(name) for name in files}
    todo = [name for name in files if stamp["installed"].get(name) != want[name]]
    if todo:
        held = in_venv("install.found()")
        if stamp["brought_torch"] is None:  # your `.venv`, seen for the first time
            stamp["brought_torch"] = "torch" in held
            if not in_venv("bool(install.importlib.util.find_spec('pip'))"):  # made by uv
                subprocess.run([PYTHON, "-m", "ensurepip"], check=True)
        if stamp["brought_torch"]:
            install_beside_torch(todo, held)
        else:
            install_tested(todo, torch_index("torch" in held, dev, cpu_index))
        stamp["installed"].update(want)
        write_stamp(stamp)


def python_below():
    """What `.venv` is to stand on: this Python's version, and its torch and package folders if it has torch >= 2.9."""
    torch = found().get("torch")
    lowest = re.search(r"^torch>=(\S+)", read("requirements.txt"), re.M)[1]
    if torch and numbers(torch["version"]) >= numbers(lowest):
        folders = [
            path
            for path in sys.path
            if os.path.basename(path) in ("site-packages", "dist-packages")
        ]
    else:
        torch, folders = None, []
    return {"venv": VENV, "python": python_version(), "torch": torch, "folders": folders}


def found():
    """{"torch": {"file", "version", "package"}, "triton": ...}: what this Python would import, without importing it."""
    from importlib import metadata

    result = {}
    for name in HELD:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            package = metadata.packages_distributions().get(name, [name])[
                0
            ]  # ROCm's triton is pytorch-triton-rocm
            result[name] = {
                "file": spec.origin,
                "version": metadata.version(package),
                "package": package,
            }
    return result


def make_venv(below):
    """A new `.venv` on the Python in use; over its packages if `below` names them. Returns its stamp."""
    torch = below["torch"]
    if torch:
        say(f".venv over torch {torch['version']} of {sys.prefix}, where nothing is changed")
        if subprocess.run([sys.executable, "-c", "import torch"], cwd="/").returncode:
            stop(
                f"torch of {sys.executable} does not import (above): mend it, or make PYTHON=another one"
            )
    else:
        say(f".venv of its own: {sys.executable} has no torch to stand on")
    pip_below = torch and importlib.util.find_spec("pip")
    if not pip_below and not importlib.util.find_spec("ensurepip"):
        stop(
            f"{sys.executable} cannot make a .venv: sudo apt install python{python_version()}-venv, then make again"
        )
    shutil.rmtree(VENV, ignore_errors=True)
    os.makedirs(VENV)
    write_stamp({"below": None})  # in case this is interrupted
    subprocess.run(
        [sys.executable, "-m", "venv", VENV] + ["--without-pip"] * bool(pip_below),
        cwd="/",
        check=True,
    )
    if torch:
        packages = os.path.join(VENV, "lib", "python" + python_version(), "site-packages")
        with open(os.path.join(packages, "python_below.pth"), "w") as f:
            f.writelines(
                f"import site; site.addsitedir({folder!r})\n" for folder in below["folders"]
            )
        for command, module in {"torchrun": "torch.distributed.run", "pip": "pip"}.items():
            path = os.path.join(
                VENV, "bin", command
            )  # those of the Python below would not see `.venv`
            if not os.path.exists(path):
                with open(path, "w") as f:
                    f.write(f'#!/bin/sh\nexec "$(dirname "$0")/python" -m {module} "$@"\n')
                os.chmod(path, 0o755)
    stamp = {"below": below, "brought_torch": bool(torch), "installed": {}}
    write_stamp(stamp)
    return stamp


def install_tested(files, index):
    """Everything at the versions of constraints.txt; torch from `index`, if there is one."""
    if index:
        pip(
            "--index-url",
            index,
            *[line for line in lines("constraints.txt") if name_of(line) == "torch"],
        )
    pip("-c", os.path.join(ROOT, "constraints.txt"), *requirements(files))


def torch_index(has_torch, dev, cpu_index):
    """Where torch's build for this machine is, None = where pip looks. PyPI's for Linux is NVIDIA's: gigabytes."""
    devices = os.listdir(dev)
    nvidia = any(name.startswith(("nvidia", "dxg")) for name in devices)  # dxg: Linux on Windows
    if sys.platform != "linux" or nvidia:
        return None
    if "kfd" in devices and not has_torch:
        stop(
            "an AMD GPU is here, torch is not, and PyPI's torch is NVIDIA's. Bring the build that you want, then make "
            f"again: {sys.executable} -m venv .venv && .venv/bin/pip install torch --index-url {PYTORCH}/rocmX.Y "
            "(X.Y: see https://pytorch.org/get-started/locally; `cpu` in place of `rocmX.Y` leaves the GPU alone)"
        )
    if shutil.which("sbatch"):  # a login node does not show the cluster's GPUs
        if not has_torch:
            say(
                "SLURM without a GPU, a login node: PyPI's torch, NVIDIA's, is taken. AMD: see ROCm in INSTALL.md"
            )
        return None
    try:
        urllib.request.urlopen(cpu_index + "/torch/", timeout=5).close()
        return cpu_index
    except OSError:
        return None  # no way there, as behind a mirror: pip's own settings decide


def install_beside_torch(files, held):
    """What is missing, at tested versions; packages that are there stay, and torch and triton exactly as they are."""
    there = {
        plain(name) for name in in_venv("[d.name for d in importlib.metadata.distributions()]")
    }
    limits = [line for line in lines("constraints.txt") if name_of(line) not in there.union(held)]
    limits += ["{package}=={version}".format(**held[name]) for name in held]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as f:
        f.write("\n".join(limits))
        f.flush()
        pip("-c", f.name, *[line for line in requirements(files) if name_of(line) not in held])
    after = in_venv("install.found()")
    if any(after.get(name) != held[name] for name in held):
        stop(f"pip changed what it had to leave alone: {held} became {after}")


def in_venv(expression):
    """The value of an expression in `.venv`'s Python."""
    code = f"import importlib.metadata, install, json; print(json.dumps({expression}))"
    return json.loads(
        subprocess.run([PYTHON, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    )


def pip(*arguments):
    command = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--no-user",
        "--disable-pip-version-check",
        *arguments,
    ]
    if subprocess.run(command).returncode:
        stop("pip failed (above): mend it and make again, what is done stays done")


def requirements(files):
    return [line for name in files for line in lines(name)]


def lines(name):
    """The lines of a requirement file, without comments."""
    return [line for line in read(name).splitlines() if line and not line.startswith("#")]


def name_of(line):
    return plain(re.match(r"[\w.-]+", line)[0])


def plain(name):
    """A package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def numbers(version):
    """2.9.0+rocm6.4 -> [2, 9]"""
    return [int(n) for n in re.findall(r"\d+", version)[:2]]


def python_version():
    return ".".join(map(str, sys.version_info[:2]))


def read(name):
    with open(os.path.join(ROOT, name)) as f:
        return f.read()


def digest(name):
    """Of all that decides what is installed for a requirement file."""
    return hashlib.sha256((read(name) + read("constraints.txt")).encode()).hexdigest()


def read_stamp():
    if os.path.exists(STAMP):
        with open(STAMP) as f:
            return json.load(f)
    return {
        "below": "yours" if os.path.exists(VENV) else None,
        "brought_torch": None,
        "installed": {},
    }


def write_stamp(stamp):
    with open(STAMP, "w") as f:
        json.dump(stamp, f, indent=2)


def say(message):
    print("install: " + message, flush=True)


def stop(message):
    print("error: " + message, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    try:
        main(sys.argv[1:] or ["requirements.txt"])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has left: quiet, as program.run
        os._exit(141)

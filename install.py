"""Makes this folder's Python environment, `.venv`: on top of the installed torch, or complete.

    the Python in use ...     `.venv` ...                    pip installs into `.venv` ...
    imports torch >= 2.9      sees that Python's packages    what is missing; never torch or triton
    does not                  is separate                    everything, as in constraints.txt

A container, a conda environment or a cluster's module has the torch that fits its driver. Replacing
it with PyPI's torch, which is built for NVIDIA, is the classic way to break an AMD machine. So pip
writes to `.venv` only. That also works over a read-only image and Debian's "externally managed"
Python, and `rm -rf .venv` undoes it. A `.venv` that you made yourself is used with the torch that
you put there: that is how to choose a build.

Run `python install.py requirements.txt`. If pip has already installed what this file asks for, it
takes 0.2 s. A `.venv` of ours that no longer works is made anew; yours is never deleted. The exit
status is 0, or 2 with one line that says what to do.

Also starts on Python 3.6, to say that 3.10 is needed.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
# What was installed. Older versions used this name too, so their `.venv` is recognised.
STAMP = os.path.join(VENV, "environment.json")
PYTORCH = "https://download.pytorch.org/whl"  # /cpu, /cu126, /rocm7.1: builds of torch
PROTECTED = ("torch", "triton")  # never replaced if they are there
HAS_PIP = "bool(importlib.util.find_spec('pip'))"


def main(files, dev="/dev", cpu_index=PYTORCH + "/cpu"):
    """Make `.venv` if there is none for the Python in use; install what the files ask for.

    files: requirement files. dev: the folder of device files. cpu_index: an index of packages with
    torch's CPU build.
    """
    if {"--help", "-h"} & set(files):
        print(__doc__.strip())
        return
    if sys.version_info < (3, 10):  # noqa: UP036
        version = f"{sys.executable} is Python {python_version()}"
        stop(f"{version}, too old: make PYTHON=python3.12, or any from 3.10 on")
    digests = {name: digest(name) for name in files}
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(os.open(ROOT, os.O_RDONLY), fcntl.LOCK_EX)  # one make at a time, until we end
    stamp = current_venv()
    outdated = [name for name in files if stamp["installed"].get(name) != digests[name]]
    if outdated:
        install(outdated, stamp, dev, cpu_index)
        stamp["installed"].update(digests)
        write_stamp(stamp)


def current_venv():
    """Make `.venv` unless it works and fits the Python in use. Returns its stamp."""
    stamp = read_stamp()
    has_pip = in_venv(HAS_PIP)
    is_active = os.path.realpath(sys.prefix) == os.path.realpath(VENV)
    if is_active or stamp["below"] == "yours":
        if has_pip is None:
            stop("the Python of .venv does not start: remove .venv, then make again")
        return stamp
    below = python_below()
    return stamp if has_pip and stamp["below"] == below else make_venv(below)


def install(files, stamp, dev, cpu_index):
    """Install requirement files into `.venv`, beside its torch or with a torch of their own."""
    protected = in_venv("install.protected_packages()")
    if stamp["brought_torch"] is None:  # a `.venv` that the user made, seen for the first time
        stamp["brought_torch"] = "torch" in protected
    if not in_venv(HAS_PIP):  # as uv makes them
        run([PYTHON, "-m", "ensurepip"])
    if stamp["brought_torch"] and "torch" in protected:
        return install_beside_torch(files, protected)
    index = torch_index("torch" in protected, dev, cpu_index)
    if index:
        torch = [line for line in lines("constraints.txt") if name_of(line) == "torch"]
        pip("--index-url", index, *torch)
    pip("-c", os.path.join(ROOT, "constraints.txt"), *requirements(files))


# --------------------------------------------------------------------------------------------------
# The virtual environment


def python_below():
    """The Python that `.venv` is made from: its version, and its torch and package folders.

    No torch and no folders if its torch is older than requirements.txt allows.
    """
    torch = protected_packages().get("torch")
    lowest = re.search(r"^torch>=(\S+)", read("requirements.txt"), re.M)[1]
    if torch and major_minor(torch["version"]) < major_minor(lowest):
        torch = None
    folders = []
    for path in sys.path:
        if torch and os.path.basename(path) in ("site-packages", "dist-packages"):
            folders.append(path)
    return {"venv": VENV, "python": python_version(), "torch": torch, "folders": folders}


def protected_packages():
    """{"torch": {"file", "version", "package"}, ...}: what would be imported; imports nothing."""
    from importlib import metadata

    packages = {}
    for name in PROTECTED:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            # ROCm's triton is in the package pytorch-triton-rocm.
            package = metadata.packages_distributions().get(name, [name])[0]
            try:
                version = metadata.version(package)
            except metadata.PackageNotFoundError:  # half of it was removed
                continue
            packages[name] = {"file": spec.origin, "version": version, "package": package}
    return packages


def make_venv(below):
    """A new `.venv` on the Python in use, over its packages if it has torch. Returns its stamp."""
    if os.path.islink(VENV) and os.listdir(VENV):  # perhaps another checkout's
        stop(f".venv is a link, and not made for {sys.executable}: remove .venv, then make again")
    torch = below["torch"]
    if torch:
        print(f"install: .venv on top of torch {torch['version']} of {sys.prefix}", flush=True)
    else:
        print(f"install: a separate .venv: {sys.executable} has no torch to use", flush=True)
    stamp = {"below": None, "brought_torch": bool(torch), "installed": {}}
    os.makedirs(VENV, exist_ok=True)
    write_stamp(stamp)  # first: if this is interrupted, the next make begins anew
    for entry in list(os.scandir(VENV)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.path != STAMP:
            os.remove(entry.path)
    has_pip = torch and importlib.util.find_spec("pip")
    run([sys.executable, "-m", "venv", VENV, *["--without-pip"] * bool(has_pip)])
    if torch:
        show_packages(below["folders"])
        write_starters()
    stamp["below"] = below
    write_stamp(stamp)
    return stamp


def show_packages(folders):
    """Let `.venv` import from these package folders, after its own.

    A .pth file names them. `venv --system-site-packages` is not enough: inside an active virtual
    environment it would expose the packages of that environment's base Python only.
    """
    packages = os.path.join(VENV, "lib", "python" + python_version(), "site-packages")
    with open(os.path.join(packages, "python_below.pth"), "w") as f:
        for folder in folders:
            f.write(f"import site; site.addsitedir({folder!r})\n")


def write_starters():
    """Write .venv/bin/torchrun and pip: the Python below has its own, which do not see `.venv`."""
    for command, module in {"torchrun": "torch.distributed.run", "pip": "pip"}.items():
        path = os.path.join(VENV, "bin", command)
        if not os.path.exists(path):
            with open(path, "w") as f:
                f.write(f'#!/bin/sh\nexec "$(dirname "$0")/python" -m {module} "$@"\n')
            os.chmod(path, 0o755)


# --------------------------------------------------------------------------------------------------
# Packages


def torch_index(has_torch, dev, cpu_index):
    """The package index that has torch's build for this machine; None = pip's own.

    PyPI's torch for Linux is built for NVIDIA: gigabytes, useless with an AMD GPU or without any.
    """
    devices = os.listdir(dev)
    nvidia = any(name.startswith(("nvidia", "dxg")) for name in devices)  # dxg: Linux on Windows
    if sys.platform != "linux" or nvidia:
        return None
    if "kfd" in devices and not has_torch:
        stop(
            "an AMD GPU is here, no torch is, and PyPI's is for NVIDIA. Install the build that you "
            f"want, then make again: {shlex.quote(sys.executable)} -m venv .venv && "
            ".venv/bin/pip install torch "
            f"--index-url {PYTORCH}/rocmX.Y (X.Y: see https://pytorch.org/get-started/locally; "
            "with `cpu` in place of `rocmX.Y` the GPU is not used)"
        )
    if os.environ.get("PIP_NO_INDEX"):
        return None  # from a folder of wheels
    import urllib.request  # slow to import, and rarely needed

    try:
        urllib.request.urlopen(cpu_index + "/torch/", timeout=5).close()
        return cpu_index
    except OSError:
        return None  # not reachable, as behind a mirror: pip's own settings decide


def install_beside_torch(files, protected):
    """Install what is missing, at tested versions. Packages that are there stay as they are."""
    installed = in_venv("[d.name for d in importlib.metadata.distributions()]")
    keep = {plain(name) for name in installed} | set(protected)
    limits = [line for line in lines("constraints.txt") if name_of(line) not in keep]
    limits += ["{package}=={version}".format(**protected[name]) for name in protected]
    wanted = [line for line in requirements(files) if name_of(line) not in protected]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as f:
        f.write("\n".join(limits))
        f.flush()
        pip("-c", f.name, *wanted)


def in_venv(expression):
    """The value of an expression in `.venv`'s Python, through JSON. None if it does not start."""
    code = f"import importlib.metadata, install, json; print(json.dumps({expression}))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        output = subprocess.run([PYTHON, "-c", code], cwd=ROOT, **pipes).stdout
        return json.loads(output.splitlines()[-1])  # a .pth file may print lines of its own
    except (OSError, ValueError, IndexError):
        return None


def run(command):
    """Run a command that must succeed."""
    if subprocess.run(command, cwd="/").returncode:
        stop(f"{shlex.join(command)} failed (above): fix it and make again")


def pip(*arguments):
    """Run `pip install` in `.venv`. Packages that it has installed stay if a later one fails."""
    command = [PYTHON, "-m", "pip", "install", "--no-user", "--disable-pip-version-check"]
    if subprocess.run([*command, *arguments]).returncode:
        stop(
            "pip failed (above): fix it and make again; what is installed stays. Without internet: "
            "see INSTALL.md"
        )


# --------------------------------------------------------------------------------------------------
# Requirement files


def requirements(files):
    """The lines of several requirement files."""
    return [line for name in files for line in lines(name)]


def lines(name):
    """The lines of a requirement file, without comments."""
    return [line for line in read(name).splitlines() if line and not line.startswith("#")]


def name_of(line):
    """The package that a line is about: `torch>=2.9` -> torch"""
    return plain(re.match(r"[\w.-]+", line)[0])


def plain(name):
    """A package's name as pip compares it: `Ruamel.YAML_x` -> ruamel-yaml-x"""
    return re.sub(r"[-_.]+", "-", name).lower()


def major_minor(version):
    """2.9.0+rocm6.4 -> [2, 9]"""
    return [int(n) for n in re.findall(r"\d+", version)[:2]]


def python_version():
    """Of the Python in use: 3.12"""
    return ".".join(map(str, sys.version_info[:2]))


def read(name):
    """The text of a file of this folder."""
    with open(os.path.join(ROOT, name)) as f:
        return f.read()


# --------------------------------------------------------------------------------------------------
# The stamp: what was installed into `.venv`, and on which Python


def digest(name):
    """A hash of all that decides what is installed for a requirement file."""
    return hashlib.sha256((read(name) + read("constraints.txt")).encode()).hexdigest()


def read_stamp():
    """The stamp of `.venv`. Without one: a new stamp, of the user's own `.venv` or of none yet.

    Without its stamp, or with a damaged one, a `.venv` may be the user's, and so counts as theirs.

    below: see `python_below`; "yours" for the user's own, None if it must be made.
    brought_torch: whether torch was there before we installed anything; None if not known yet.
    installed: requirement file -> its digest.
    """
    is_none = not os.path.lexists(VENV) or (os.path.isdir(VENV) and not os.listdir(VENV))
    stamp = {"below": None if is_none else "yours", "brought_torch": None, "installed": {}}
    try:
        with open(STAMP) as f:
            stamp.update(json.load(f))
    except (OSError, ValueError):
        pass
    return stamp


def write_stamp(stamp):
    """Write the stamp of `.venv`."""
    with open(STAMP, "w") as f:
        json.dump(stamp, f, indent=2)


def stop(message):
    """Exit with a user error."""
    print("error: " + message, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    try:
        main(sys.argv[1:] or ["requirements.txt"])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output is gone: exit quietly, as program.run does
        os._exit(141)
    except OSError as error:  # no permission, a full disk
        stop(str(error))

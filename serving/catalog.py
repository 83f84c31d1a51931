"""The catalog: which model each name means. The base, and the adapters in one folder.

    adapters/poems/            poems        a PEFT folder
    adapters/lora-demo/        lora-demo    a run with --lora_rank, once it has finished
    adapters/team/answers/     its path below adapters/, as that of a checkpoint; any name by `load`

A request looks at the files of its model, and a list at the whole folder, once a second at most.
Weights are read when an adapter is first asked for, by its name or in a list of `usable` ones. So
an adapter that is damaged or of another base is refused by name before an answer begins.

Bank and prompt caches know an adapter by its `key`: its path, and the state of its files. So two
versions cannot mix:

    catalog = Catalog("base", folder, read, check=lambda *found: bank.check(*found))
    bank = AdapterBank(..., read=catalog.read)
    text = Text(..., adapter=catalog.find("poems").key)

Any thread may call any method.

Run `python -m serving.catalog runs` for the adapters in a folder, checked for damage.
"""

import bisect
import contextlib
import difflib
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import checkpoint
from lifecycle import runlog
from program import UserError, arguments, one_line, require, run
from serving.adapters import BASE
from storage import checkpoint_files
from weights import peft
from weights.peft import Adapter

# An adapter changes with one of these. A checkpoint is never written twice.
FILES = [peft.CONFIG_FILE, peft.TENSOR_FILE, ".metadata", "checksums.json"]
LONGEST_NAME = 200  # characters
NEAR = 200  # names before and behind an unknown one that it is compared with
SCAN_SECONDS = 1.0  # between two looks at the whole folder


@dataclass(eq=False)
class Model:
    """What a name means.

    path: a PEFT folder, or a checkpoint of a run; "" for the base. version: of its files. fault:
    why it cannot be used, "" if it can, None before it is checked.
    """

    name: str
    path: str
    version: str
    fault: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def key(self) -> str:
        """The name of this version in the bank."""
        return f"{self.path} (version {self.version})" if self.path else BASE


class Catalog:
    """The base and its adapters by name. Without a base, there is no model.

    folder: of adapters; None: there are none. read: path -> Adapter. check: (path, Adapter) raises
    UserError if it does not fit, as AdapterBank.check.
    """

    def __init__(self, base: str = "", folder=None, read: Callable = None, check: Callable = None):
        """UserError if there is no such folder."""
        self.base = base
        self.folder = Path(folder).resolve() if folder else None
        is_folder = not folder or self.folder.is_dir()
        require(is_folder, f"{folder} is no folder: give one that holds adapters")
        self.read_path = read
        self.check = check
        self.models = {base: Model(base, "", "", fault="")} if base else {}
        self.chosen = {}  # name -> path, of those that `load` has found elsewhere
        self.unloaded = set()  # names that mean nothing, whatever is in the folder
        self.lock = threading.Lock()  # of these tables
        self.scanned_at = -math.inf

    # ----------------------------------------------------------------------------------------------
    # Requests

    def find(self, name: str) -> Model:
        """The model that a name means. UserError if there is none, or it cannot be used."""
        require(
            self.base,
            "this server shows runs, and has no model: start it with one, python serve.py RUN",
        )
        model = self.look(name)
        if model is None:
            raise UserError(f"no model {name[:LONGEST_NAME]!r}, {self.similar(name)}")
        fault = self.fault_of(model)
        require(not fault, f"the model {name!r} cannot be used: {fault}")
        return model

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
        if self.folder and time.monotonic() - self.scanned_at > SCAN_SECONDS:
            with contextlib.suppress(OSError):  # of a file system that is away for a moment
                self.scan()
        with self.lock:
            models = list(self.models.values())
        return models[:1] + sorted(models[1:], key=lambda model: model.name)

    def usable(self) -> list[Model]:
        """Those of them without a fault. Reads the adapters that are new."""
        return [model for model in self.listed() if not self.fault_of(model)]

    def read(self, key: str) -> Adapter:
        """What the bank loads. UserError if its files have changed since it had this key."""
        path, _, version = key[:-1].rpartition(" (version ")
        changed = f"the files of {self.public(path)} have changed: ask for it again"
        require(version_of(path) == version, changed)
        found = self.read_path(path)
        require(version_of(path) == version, changed)  # while they were read
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
    # The folder

    def scan(self) -> None:
        """Look at all that is in the folder. OSError if it cannot be read."""
        with os.scandir(self.folder) as entries:
            names = {entry.name for entry in entries if is_folder(entry)}
        with self.lock:
            names.update(self.models)
            unloaded = set(self.unloaded)
        gone = {name for name in unloaded if not self.source(name)}
        with self.lock:
            self.unloaded -= gone  # what comes there later is another adapter
        for name in sorted(names):
            self.look(name)
        self.scanned_at = time.monotonic()

    def look(self, name: str) -> Model | None:
        """The model that a name means by the files there are now. Reads no weights."""
        with self.lock:
            old = self.models.get(name)
            if name == self.base or not self.folder or name in self.unloaded:
                return old
            source = self.chosen.get(name) or self.source(name)
            found = Model(name, source, version_of(source)) if source else None
            if old and found and old.key == found.key:
                return old
            if found and name not in self.chosen and not self.is_ready(found):
                # A run that goes on: its last end still counts.
                found = old if old and version_of(old.path) == old.version else None
            if found:
                self.models[name] = found
            else:
                self.models.pop(name, None)
            return found

    def source(self, path: str) -> str | None:
        """The adapter at a path, from the folder on. None if there is none, or it is outside.

        A path has one spelling, so that no adapter has two names. What a link in the folder itself
        leads to is looked at, and refused with its reason when it is read.
        """
        try:
            is_path = path.isprintable() and not {"", ".", ".."} & set(path.split("/"))
            place = self.folder / path
            if not is_path or not (
                place.parent == self.folder or place.resolve().is_relative_to(self.folder)
            ):
                return None
            return source_of(place)
        except (ValueError, OSError, RuntimeError):  # what is no path, or a link to itself
            return None

    def is_ready(self, model: Model) -> bool:
        """Is this an adapter, and no run that has not finished? Its checkpoints may be asked for.

        Notes what is wrong if that cannot be read.
        """
        try:
            is_itself = Path(model.path) == self.folder / model.name
            return is_itself or peft.is_peft(model.path) or is_finished(Path(model.path))
        except (UserError, OSError) as error:
            model.fault = self.public(str(error))
            return True

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
        source = self.source(os.path.relpath(path, self.folder) if os.path.isabs(path) else path)
        none = f"no adapter in {path[:LONGEST_NAME]!r}: expected a PEFT folder or a run"
        require(source, none)
        model = Model(name, source, version_of(source))
        fault = self.fault_of(model)
        require(not fault, fault)
        with self.lock:
            self.unloaded.discard(name)
            self.chosen.pop(name, None)
            if self.source(name) != source:
                self.chosen[name] = source
            self.models[name] = model
        return model

    def unload(self, name: str) -> None:
        """Forget an adapter. Texts that have begun go on. UserError if there is none."""
        require(name != self.base, f"{name!r} is the base, which stays")
        is_there = name in self.models or self.look(name)
        require(is_there, f"no adapter {name[:LONGEST_NAME]!r} is loaded")
        with self.lock:
            self.models.pop(name, None)
            self.chosen.pop(name, None)
            self.unloaded.add(name)

    def require_inside(self, path) -> None:
        """UserError if an adapter or one of its files is outside of the folder, as by a link."""
        for place in [Path(path), *(Path(path, name) for name in FILES)]:
            is_inside = place.resolve().is_relative_to(self.folder)
            problem = f"{self.public(str(path))} is not inside the folder of adapters"
            require(is_inside, f"{problem}: copy it there")


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


def version_of(path: str) -> str:
    """The state of an adapter's files. Two states of the same files differ."""
    stamps = []
    for name in FILES:
        try:
            status = os.stat(os.path.join(path, name))
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            stamps.append(None)
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]


def is_finished(path: Path) -> bool:
    """Is a checkpoint the last one of a run with adapters? UserError if that cannot be read."""
    if not checkpoint_files.read_adapter_settings(path):
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

"""Text -> token shards on disk, once for each data set.

Documents come from text/corpus.py in a fixed order. They are grouped into chunks, and each chunk is
encoded into two files of raw tokens after a JSON header: one for training, one for validation.
Every `1 / val_fraction`-th document goes to validation, whole. Each file is written under a
temporary name and renamed, so a file that exists is complete. A chunk that is already on disk is
skipped, so an interrupted preparation resumes.

    data/stdlib-bpe-4096/   dataset.json  tokenizer.json  train-00000.bin ...  val-00000.bin ...

dataset.json says what the tokens were made from: settings, and short hashes of files.

    other settings    the folder is refused
    a file changed    `python data.py` encodes what has changed; a new run refuses the folder, since
                      an earlier one may need the old tokens; a run with a checkpoint takes them

Runs that start together prepare once: one holds prepare.lock, the others wait, on other nodes too.
On a file system without locks each makes the same files, under temporary names of its own (with
--max_tokens, run data.py first there).

Each source of a mixture (--mix) has a folder of its own, so it can be made again without the
others: DATA_DIR/NAME, or without --data_dir that of a run on this source alone. All have the
tokenizer of the first source, after which a `bpe-N` names them: data/mine-bpe-4096-of-stdlib.

Run `python data.py --dataset='my/*.txt' --tokenizer=bpe-4096`, or with a config file.
"""

import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import program
from config import TrainConfig
from program import UserError, require
from storage import files
from text import corpus
from text import tokenizer as tokenizers
from text.shards import (
    HASH_BYTES,
    Shard,
    fingerprint,
    read_summary,
    require_shard,
    shard_files,
    truncate_shard,
    write_ids,
)

BPE_CHARACTERS = 16 * 2**20  # the amount of text from which a BPE is trained

# fsdp_train.py prepares a missing data set itself if it is within one of these limits.
SMALL_TOKENS = 100_000_000
SMALL_BYTES = 2**29
FIRST_SLICE = 20_000_000  # tokens: a first look at a data set of the Hub
FIRST_SLICE_COST = "40 MB on disk, about a minute on two cores"

# --------------------------------------------------------------------------------------------------
# What a folder is made from


@dataclass(frozen=True)
class Recipe:
    """What the tokens of a run are made from, and in which folder they belong.

    max_seq_len: tokens of a row of prompts and responses (data_format=chat). Text needs none.
    source: its name in a mixture, whose data set is then cfg.dataset: see `each_source`.
    """

    cfg: TrainConfig
    max_seq_len: int = 0
    source: str = ""

    @functools.cached_property
    def first(self) -> "Recipe | None":
        """The recipe of the mixture's first source, whose tokenizer this other source takes."""
        if not self.cfg.mix:
            return None
        (cfg, name), *_ = each_source(self.cfg)
        return None if name == self.source else Recipe(cfg, self.max_seq_len, name)

    @functools.cached_property
    def folder(self) -> Path | str:
        """The folder of the shards: `--data_dir`, or data/DATASET-TOKENIZER. Of a store, a str."""
        if self.store:
            return self.store.url
        if self.cfg.data_dir:
            return Path(self.cfg.data_dir) / self.source
        names = [self.cfg.dataset, tokenizers.canonical(self.cfg.tokenizer)]
        if self.first and names[1].startswith("bpe"):
            names += ["of", self.first.cfg.dataset]
        plain_names = [re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") for name in names]
        return Path("data") / "-".join(plain_names)

    @functools.cached_property
    def store(self):
        """The object store that holds the shards, None if they are in a folder."""
        if "://" not in self.cfg.data_dir:
            return None
        from storage.object_store import open_store  # here, since most runs do without

        return open_store(self.cfg.data_dir)

    def summary(self) -> dict | None:
        """dataset.json, or None if there is none. UserError if it is damaged."""
        if not self.store:
            return read_summary(self.folder)
        from text import fetch

        return fetch.read_summary(self.store)

    def read(self, name: str) -> bytes | None:
        """The content of a file of the folder, or of the store. None if there is none."""
        try:
            return self.store.get(name) if self.store else files.read_bytes(self.folder / name)
        except FileNotFoundError:
            return None

    @functools.cached_property
    def row_format(self):
        """The `chat.RowFormat` of prompts and responses, None for text."""
        if self.cfg.data_format == "text":
            return None
        from text import chat  # here, since most runs do without

        return chat.RowFormat.of(self.cfg, self.max_seq_len)

    def settings(self) -> dict:
        """The settings on which every token depends. A folder has one set of them."""
        cfg = self.cfg
        settings = {
            "dataset": cfg.dataset,
            "tokenizer": tokenizers.canonical(cfg.tokenizer),
            "val_fraction": cfg.val_fraction,
            "data_format": cfg.data_format,
        }
        if self.row_format:
            settings |= {"chat_template": cfg.chat_template, **dataclasses.asdict(self.row_format)}
        return settings

    def source_hash(self) -> str:
        """A short hash that changes with the files of the data set."""
        if self.row_format:  # every byte counts: people correct examples by hand
            return corpus.content_hash(self.cfg.dataset)
        return corpus.source_state(self.cfg.dataset, HASH_BYTES)

    def template_hash(self) -> str:
        """A short hash that changes with the chat template."""
        from text import chat

        return chat.load_template(self.cfg.chat_template).fingerprint

    def require_settings(self, summary: dict) -> None:
        """UserError if the folder was made with other settings."""
        made_with = {"data_format": "text"} | summary  # older summaries of text do not say it
        for key, value in self.settings().items():
            flag = f"--{key}={program.one_line(made_with.get(key))}"
            fix = f"set {program.shell(flag)}"
            if self.source and key == "dataset":
                fix = "delete that folder if no run needs it"
            require(
                made_with.get(key) == value,
                f"{self.folder} was made with {flag}, not {value}: {fix}, "
                "or set another --data_dir",
            )

    def changed_files(self, summary: dict) -> list[str]:
        """The settings whose files changed since. What is not here is not checked."""
        cfg, changed = self.cfg, []
        if corpus.is_here(cfg.dataset):
            now = self.source_hash()
            # Older versions wrote a hash of names and sizes alone.
            if summary["source"] not in (now, corpus.sizes_hash(cfg.dataset)):
                known_by = "sizes or times of " if now.startswith("times") else ""
                changed.append(f"{known_by}dataset={cfg.dataset}")
        has_template = not cfg.chat_template or Path(cfg.chat_template).exists()
        if self.row_format and has_template and self.template_hash() != summary.get("template"):
            changed.append(f"chat_template={cfg.chat_template}")
        given = self.given_tokenizer()
        if given and given != self.read("tokenizer.json"):
            changed.append(f"tokenizer={cfg.tokenizer}")
        return changed

    def given_tokenizer(self) -> bytes | None:
        """The tokenizer.json of which the folder holds a copy. None: there is none, or not here."""
        if self.first and (of_first := self.first.read("tokenizer.json")):
            return of_first
        name = self.cfg.tokenizer
        return tokenizers.json_of(name) if name.endswith(".json") and os.path.exists(name) else None

    def command(self) -> str:
        """The command that makes the folder, of a mixture all, or one to be copied to the store."""
        folder = "data/tokens" if self.store else self.folder
        flags = self.settings() | {"max_tokens": self.cfg.max_tokens, "data_dir": folder}
        if self.source:
            flags["data_dir"] = self.cfg.data_dir
            del flags["dataset"]
        if self.max_seq_len:
            flags["max_seq_len"] = self.max_seq_len
        if self.cfg.init_from:  # which may have the tokenizer
            flags["init_from"] = self.cfg.init_from
        words = [f"--mix={line}" for line in self.cfg.mix]
        words += [f"--{name}={value}" for name, value in flags.items()]
        return f"python data.py {program.shell(*words)}"


def each_source(cfg: TrainConfig) -> list[tuple[TrainConfig, str]]:
    """(settings with its data set, name) of each source of a mixture, as Recipe takes them."""
    from text import mixture  # here, since most runs do without

    sources = mixture.sources(cfg.mix)
    return [(dataclasses.replace(cfg, dataset=s.dataset), s.name) for s in sources]


def of_mixture(function, cfg: TrainConfig, *args) -> list[Path]:
    """What `prepare` or `open_or_prepare` returns for each source of a mixture."""
    require(
        "://" not in cfg.data_dir,
        f"a mixture is read from folders of this machine, not from {cfg.data_dir}: "
        "set --data_dir to a folder, or leave it out",
    )
    folders = []
    for of_source, name in each_source(cfg):
        try:
            folders.append(function(of_source, *args, source=name))
        except UserError as error:
            raise UserError(f"source {name} of the mixture: {error}") from error
    return folders


def has_enough(summary: dict, max_tokens: int) -> bool:
    """Does a prepared folder hold `max_tokens` training tokens? 0 asks for the whole data set."""
    was_unlimited = summary["max_tokens"] == 0
    ran_out_of_text = summary["train_tokens"] < summary["max_tokens"]
    if was_unlimited or ran_out_of_text:
        return True  # it holds the whole data set
    return 0 < max_tokens <= summary["max_tokens"]


# --------------------------------------------------------------------------------------------------
# When a run begins


def open_or_prepare(cfg: TrainConfig, max_seq_len: int = 0, source: str = "") -> Path:
    """The checked data folder of a training run; of a store, the one that `fetch.copy` fills.

    A small data set that is missing is prepared first, though not in a store. Global rank 0 alone
    calls it. max_seq_len, source: as for `prepare`. Raises UserError for a large one, with the
    command that prepares it, and for a folder that is damaged, or made from something else.
    """
    recipe = Recipe(cfg, max_seq_len, source)
    folder = recipe.folder
    summary = recipe.summary()
    if summary:
        recipe.require_settings(summary)
        require_unchanged(recipe, summary)
        require_all_tokens(recipe, summary)
    if not summary or not (has_enough(summary, cfg.max_tokens) or has_begun(cfg)):
        if not recipe.store:
            require_small(recipe, summary)
        prepare(cfg, max_seq_len=max_seq_len, source=source)
        summary = read_summary(folder)
    if recipe.store:
        from text import fetch

        return fetch.folder_of(summary, cfg.data_cache)
    require(
        fingerprint(folder) == summary["fingerprint"],
        f"a shard is missing in {folder}: {recipe.command()} makes it",
    )
    shards = [Shard(path) for path in shard_files(folder)]  # checks headers and sizes
    if sum(shard.ids.nbytes for shard in shards) <= HASH_BYTES:
        for shard in shards:
            shard.check_hash()
    return folder


def require_unchanged(recipe: Recipe, summary: dict) -> None:
    """UserError if a file changed after the folder was made; a note if the run has begun."""
    changed = recipe.changed_files(summary)
    if not changed:
        return
    since = f"{' and '.join(changed)} changed after {recipe.folder} was made"
    if has_begun(recipe.cfg):
        program.print_error(f"{since}: this run takes the old tokens", "note")
        return
    # Not prepared again here: a run that was trained on the old rows may want to go on with them.
    raise UserError(
        f"{since}: set another --data_dir, or make "
        f"it again if no run on the old data has to resume: {recipe.command()}"
    )


def has_begun(cfg: TrainConfig) -> bool:
    """Does a run have a checkpoint to go on from, or name one?"""
    names = [path.name for path in Path(cfg.run_dir).glob("checkpoints/step-[1-9]*")]
    steps = [int(name[5:]) for name in names if name[5:].isdecimal()]
    if cfg.resume == "again" and max(steps, default=0) >= cfg.max_steps:
        return False  # a finished run, which will be put aside
    return bool(steps) or cfg.resume not in ("auto", "again", "never")


def require_all_tokens(recipe: Recipe, summary: dict) -> None:
    """UserError if all tokens are wanted and the folder holds only the first ones. A note if it
    holds more than are wanted, since one folder serves runs of different length, or fewer than a
    run wants that has begun with them.
    """
    max_tokens, n_tokens = recipe.cfg.max_tokens, summary["train_tokens"]
    holds = f"{recipe.folder} holds {n_tokens:,} training tokens"
    if has_enough(summary, max_tokens):
        if 0 < max_tokens < n_tokens:
            program.print_error(f"{holds}, more than --max_tokens: this run reads all", "note")
    elif has_begun(recipe.cfg):
        program.print_error(f"{holds}, fewer than --max_tokens: this run goes on with them", "note")
    else:
        require(
            max_tokens,
            f"{recipe.folder} holds only the first {n_tokens:,} training tokens: set "
            f"--max_tokens={n_tokens}, or make the rest if no run on these has to resume: "
            f"{recipe.command()}",
        )


def require_small(recipe: Recipe, summary: dict | None) -> None:
    """UserError, with the command that prepares the data set, if it is too large to prepare now."""
    cfg = recipe.cfg
    paths = corpus.files(cfg.dataset)
    few_tokens = 0 < cfg.max_tokens <= SMALL_TOKENS
    few_bytes = paths and sum(map(os.path.getsize, paths)) <= SMALL_BYTES

    found = f"only {summary['train_tokens']:,} tokens are" if summary else "no data set is"
    now = ["--dataset=stdlib --tokenizer=bpe-4096 (Python's own source)"] * (not cfg.mix)
    if not paths or cfg.mix:  # it is on the Hub
        now.append(f"--max_tokens={FIRST_SLICE} (a first slice: {FIRST_SLICE_COST})")
    require(
        few_tokens or few_bytes,
        f"{found} in {recipe.folder}, and all of it is too much, or of unknown size, to prepare "
        "while a run starts. "
        f"To begin now, add to your command {', or '.join(now)}. "
        f"For all of it, first run: {recipe.command()}",
    )


# --------------------------------------------------------------------------------------------------
# Making


def prepare(cfg: TrainConfig, workers: int = 1, max_seq_len: int = 0, source: str = "") -> Path:
    """Make the token shards of `cfg.dataset` unless they are complete. Returns their folder.

    workers: processes that encode, which change no file. max_seq_len, source: see `Recipe`. If
    another process prepares the folder, this one waits for it. Raises UserError if the data set
    cannot be read or holds too little text, or if the folder was made with other settings.
    """
    recipe = Recipe(cfg, max_seq_len, source)
    folder = recipe.folder
    require(
        not recipe.store,
        f"{folder} lacks what is asked for, and a store cannot be written to: prepare a folder and "
        f"copy its files there: {recipe.command()}",
    )
    if is_made(recipe, read_summary(folder)):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder / "prepare.lock", f"{folder} is being prepared") as is_alone:
        summary = read_summary(folder)  # of the process that this one has waited for
        if not is_made(recipe, summary):
            try:
                make_shards(recipe, summary, workers, is_alone)
            except corpus.NoHub as error:
                raise UserError(
                    f"cannot reach the Hub for dataset={cfg.dataset!r}: run this where there is "
                    f"internet, `{recipe.command()}`, and copy {folder} from there to {folder} here"
                ) from error
    return folder


def is_made(recipe: Recipe, summary: dict | None) -> bool:
    """Does the folder hold what is asked for? UserError if it was made with other settings."""
    if not summary:
        return False
    recipe.require_settings(summary)
    shards_are_same = fingerprint(recipe.folder) == summary["fingerprint"]
    has_all = shards_are_same and has_enough(summary, recipe.cfg.max_tokens)
    return has_all and not recipe.changed_files(summary)


def make_shards(recipe: Recipe, summary: dict | None, workers: int, is_alone: bool) -> None:
    """Make the shards of a folder that are missing or wrong, then its dataset.json.

    summary: what dataset.json held. is_alone: no other process makes shards here now, so temporary
    files are those of crashes.
    """
    cfg, folder = recipe.cfg, recipe.folder
    # Before the text is read: an edit from now on is a change.
    hashes = {"source": recipe.source_hash()}
    if recipe.row_format:
        hashes["template"] = recipe.template_hash()
    if summary:
        if summary["tokenizer"].startswith("bpe") and recipe.changed_files(summary):
            (folder / "tokenizer.json").unlink(missing_ok=True)  # it learned from other text
        (folder / "dataset.json").unlink(missing_ok=True)
    if ignored := corpus.left_out(cfg.dataset):
        print(f"dataset={cfg.dataset}{ignored}", file=sys.stderr, flush=True)
    tokenizer = make_tokenizer(recipe)
    n_chunks, train_tokens = encode_dataset(recipe, tokenizer, workers)
    remove_what_is_left(folder, n_chunks, is_alone)
    require(n_chunks > 0, f"dataset={cfg.dataset!r} is empty: no document has any text")
    if recipe.row_format:
        require_learned_tokens(recipe)
    require(
        train_tokens > 0,
        f"dataset={cfg.dataset!r} has one document only, and validation gets that one: "
        "split it into several documents",
    )
    summary = {
        **recipe.settings(),
        **hashes,
        "vocab_size": tokenizer.vocab_size,
        "max_tokens": cfg.max_tokens,
        "train_tokens": train_tokens,
        "fingerprint": fingerprint(folder),
    }
    files.write_atomically(folder / "dataset.json", json.dumps(summary, indent=2).encode())


def make_tokenizer(recipe: Recipe):
    """The tokenizer of a data folder. Its file, if it has one, is put into the folder first.

    A `bpe-N` is that of the run to start from (init_from), or trained on the first documents of the
    data set, unless the folder has one already. Of a mixture, the first source has it.
    """
    cfg = recipe.cfg
    name = tokenizers.canonical(cfg.tokenizer)
    path = recipe.folder / "tokenizer.json"

    if name.endswith(".json") and (os.path.exists(name) or not path.exists()):
        tokenizers.load(name)  # an error names this file, not its copy
    given = recipe.given_tokenizer()
    if given is None and not path.exists():
        of_base = file_of_base(cfg, name)
        given = of_base and files.read_bytes(of_base)
    if given:
        files.write_atomically(path, given)  # later runs read this copy: the original may be moved

    if name.startswith("bpe") and not path.exists():
        print(f"training a tokenizer ({name}) on {cfg.dataset} ...", file=sys.stderr, flush=True)
        vocab_size = int(name.split("-")[1])
        tokenizers.train_bpe(first_texts(cfg, BPE_CHARACTERS), vocab_size).save(path)

    return tokenizers.load(name, path)


def file_of_base(cfg: TrainConfig, name: str) -> Path | None:
    """The file of the `bpe-N` of the run, or checkpoint, at init_from; None if it has another."""
    if not (cfg.init_from and name.startswith("bpe")):
        return None
    given = Path(cfg.init_from)
    for folder in (given, given.parent.parent):
        file = folder / "tokenizer.json"
        if file.exists() and files.read_json(file).get("name") == name:
            return file
    return None


def documents_of(cfg: TrainConfig, tokenizer=None):
    """The documents of a data set, or the examples of a chat: see `chat.examples`.

    tokenizer: what will encode them; None: they are plain text, to train a tokenizer.
    """
    if cfg.data_format == "text":
        return corpus.documents(cfg.dataset, tokenizer)
    from text import chat

    reserved = tokenizer.special_tokens if tokenizer else None
    examples = chat.examples(cfg.dataset, chat.load_template(cfg.chat_template, reserved))
    return examples if tokenizer else map(chat.plain_text, examples)


def first_texts(cfg: TrainConfig, n_characters: int) -> list[str]:
    """The first documents of a data set, until they have more than `n_characters`, and of each at
    most as many.
    """
    texts = []
    total = 0
    for text in documents_of(cfg):
        require(
            isinstance(text, str),
            f"dataset={cfg.dataset!r} holds ids already: set --tokenizer to the one that made "
            "them, gpt2 or its tokenizer.json",
        )
        texts.append(text[:n_characters])
        total += len(text)
        if total > n_characters:
            break
    return texts


def encode_dataset(recipe: Recipe, tokenizer, workers: int) -> tuple[int, int]:
    """Encode the chunks of a data set into shards. Returns (chunks, training tokens)."""
    cfg, row_format = recipe.cfg, recipe.row_format
    # A row has examples of one chunk: the more there are to choose from, the fuller it gets.
    first_characters = corpus.CHUNK_CHARACTERS if row_format else corpus.FIRST_CHUNK_CHARACTERS
    chunks = corpus.chunks(documents_of(cfg, tokenizer), first_characters)
    val_every = max(2, round(1 / cfg.val_fraction))  # 0.02: every 50th document
    # A worker process loads the tokenizer by its name: tiktoken's encodings cannot be pickled.
    encode = functools.partial(encode_chunk, recipe.folder, tokenizer.name, val_every, row_format)
    style = {"unit": " tokens", "unit_scale": True, "delay": 2}  # drawn if it takes 2 seconds
    with tqdm(desc="tokens", total=cfg.max_tokens or None, **style) as bar:
        if workers <= 1:
            return collect(map(encode, chunks), cfg.max_tokens, bar)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, initializer=program.end_with_parent) as pool:
            results = bounded_map(pool, encode, chunks, depth=2 * workers)
            return collect(results, cfg.max_tokens, bar)


def bounded_map(pool, function, items, depth: int):
    """Like `pool.map`, which reads all items first, but at most `depth` of them are in flight."""
    pending = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) >= depth:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def collect(results, max_tokens: int, bar) -> tuple[int, int]:
    """Count the tokens of finished chunks, and stop at exactly `max_tokens` (0: never).

    results: (path of the training shard, its tokens) of each chunk, in order. The last one is cut
    off where the limit is reached. Returns (chunks, training tokens).
    """
    n_chunks = total = 0
    for path, tokens in results:
        n_chunks += 1
        total += tokens
        bar.update(tokens)
        if 0 < max_tokens <= total:
            if total > max_tokens:
                truncate_shard(path, tokens - (total - max_tokens))
            return n_chunks, max_tokens
    return n_chunks, total


def remove_what_is_left(folder: Path, n_chunks: int, is_alone: bool) -> None:
    """Remove shards that workers encoded beyond max_tokens, of the chunks `n_chunks` and later.

    is_alone: remove temporary files of preparations that were killed, too.
    """
    for path in shard_files(folder):
        if int(path.stem.split("-")[1]) >= n_chunks:
            require_shard(path)
            path.unlink()

    ours = re.compile(r"((train|val)-[0-9]+\.bin|(dataset|tokenizer)\.json)\.")
    for path in folder.glob("*.tmp") if is_alone else ():
        if ours.match(path.name):
            path.unlink(missing_ok=True)


def encode_chunk(folder: Path, tokenizer_name: str, val_every: int, row_format, chunk):
    """Encode one chunk into train-N.bin and val-N.bin, unless these are already right.

    chunk: as of `corpus.chunks`. val_every: of so many documents, one is for validation.
    row_format: see `Recipe`. Returns the path of the training shard and its tokens.
    """
    number, first_document, documents = chunk
    tokenizer = tokenizers.load(tokenizer_name, folder / "tokenizer.json")

    of_split = {"train": [], "val": []}
    for index, document in enumerate(documents, first_document):
        of_split["val" if index % val_every == 0 else "train"].append(document)

    for split, some in of_split.items():
        path = folder / f"{split}-{number:05d}.bin"
        made_from = [tokenizer.fingerprint, some]
        if row_format:
            made_from.append(str(row_format))
        shard_key = hashlib.sha256(json.dumps(made_from, default=hash_of).encode()).hexdigest()
        if some and is_finished(path, shard_key):
            continue
        if row_format:
            from text import chat

            ids, about = chat.make_rows(some, tokenizer, row_format)
        else:
            ids, about = make_ids(some, tokenizer)
        write_ids(path, ids, about | {"text_sha256": shard_key})

    path = folder / f"train-{number:05d}.bin"
    return path, Shard(path).header["tokens"]


def hash_of(ids: np.ndarray) -> str:
    """What `json.dumps` writes in place of ids."""
    return hashlib.sha256(ids).hexdigest()


def is_finished(path: Path, shard_key: str) -> bool:
    """Is this shard intact, and made from this? UserError for a file of another program."""
    require_shard(path)
    try:
        shard = Shard(path)
        shard.check_hash()
    except (UserError, OSError):
        return False
    return shard.header["text_sha256"] == shard_key


def make_ids(documents: list, tokenizer) -> tuple[np.ndarray, dict]:
    """Documents -> the ids of a shard, (n,) of the tokenizer's dtype, and what its header says.

    Behind the ids of a text comes end-of-text. A document of ids stays as it is. `text_bytes` is
    the length of all text in UTF-8, without end-of-text.
    """
    end = np.array([tokenizer.eot], tokenizer.dtype)
    parts = [np.empty(0, tokenizer.dtype)]
    n_bytes = 0
    for document in documents:
        if isinstance(document, str):
            n_bytes += len(document.encode("utf-8", "replace"))
            parts += [tokenizer.encode(document), end]
        else:
            n_bytes += max(1, len(tokenizer.decode_bytes(document[document != tokenizer.eot])))
            parts.append(document)
    about = {
        "documents": len(documents),
        "text_bytes": n_bytes,
        "vocab_size": tokenizer.vocab_size,
    }
    return np.concatenate(parts), about


def require_learned_tokens(recipe: Recipe) -> None:
    """UserError if no example for training, or none for validation, has a token to learn."""
    cfg = recipe.cfg
    which = "last " if cfg.target_responses == "last" else ""
    fixes = {
        "train": "Remove some of these weights, or raise max_seq_len",
        "val": f"Raise --val_fraction={cfg.val_fraction}, so that validation gets other examples",
    }
    for split, fix in fixes.items():
        headers = [Shard(path).header for path in shard_files(recipe.folder, split)]
        n_examples = sum(header["documents"] + header["dropped"] for header in headers)
        require(n_examples > 0, f"dataset={cfg.dataset!r} has one example only: add others")
        require(
            any(header["learned"] for header in headers),
            f"nothing to learn in the {n_examples:,} {split} examples: every {which}response has "
            f"weight 0, or lies beyond --max_seq_len={recipe.max_seq_len}. {fix}",
        )

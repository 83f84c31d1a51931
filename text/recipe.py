"""The recipe of a folder of tokens: what they are made from. Is the folder of a run ready?

dataset.json says what the tokens were made from: settings, and short hashes of files.

    other settings    the folder is refused
    a file changed    `python data.py` encodes what has changed; a new run refuses the folder, since
                      an earlier one may need the old tokens; a run with a checkpoint takes them

text/prepare.py makes them. Nothing here reads text, so a run whose tokens are ready needs no more.

Each source of a mixture (--mix) has a folder of its own, so it can be made again without the
others: DATA_DIR/NAME, or without --data_dir that of a run on this source alone. All have the
tokenizer of the first source, after which a `bpe-N` names them: data/mine-bpe-4096-of-stdlib.
"""

import dataclasses
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import program
from config import TrainConfig
from program import UserError, require
from storage import files
from text import sources
from text.shards import HASH_BYTES, Shard, fingerprint, read_summary, shard_files


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
        names = [self.cfg.dataset, sources.canonical(self.cfg.tokenizer)]
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
            "tokenizer": sources.canonical(cfg.tokenizer),
            "val_fraction": cfg.val_fraction,
            "data_format": cfg.data_format,
        }
        if self.row_format:
            settings |= {"chat_template": cfg.chat_template, **dataclasses.asdict(self.row_format)}
        return settings

    def source_hash(self) -> str:
        """A short hash that changes with the files of the data set."""
        if self.row_format:  # every byte counts: people correct examples by hand
            return sources.content_hash(self.cfg.dataset)
        return sources.source_state(self.cfg.dataset, HASH_BYTES)

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
        if sources.is_here(cfg.dataset):
            now = self.source_hash()
            # Older versions wrote a hash of names and sizes alone.
            if summary["source"] not in (now, sources.sizes_hash(cfg.dataset)):
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
        if not (name.endswith(".json") and os.path.exists(name)):
            return None
        from text import tokenizer  # here, since most runs have one of ours

        return tokenizer.json_of(name)

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

    found = mixture.sources(cfg.mix)
    return [(dataclasses.replace(cfg, dataset=each.dataset), each.name) for each in found]


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


def is_ready(recipe: Recipe) -> bool:
    """Does its folder hold the tokens of a run? UserError if it was made from something else.

    A run that has begun goes on with the tokens that are there.
    """
    summary = recipe.summary()
    if not summary:
        return False
    recipe.require_settings(summary)
    require_unchanged(recipe, summary)
    require_all_tokens(recipe, summary)
    return has_enough(summary, recipe.cfg.max_tokens) or has_begun(recipe.cfg)


def verify_folder(recipe: Recipe) -> Path:
    """Check the shards of a recipe that `is_ready`. Returns their folder.

    Of a store, that is the folder which `fetch.copy` fills, unchecked. UserError if a shard is
    missing or damaged. Of large ones only headers and sizes are read.
    """
    folder, summary = recipe.folder, recipe.summary()
    if recipe.store:
        from text import fetch

        return fetch.folder_of(summary, recipe.cfg.data_cache)
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

"""Settings: defaults, then config files, then flags, into typed dataclasses. A typo is an error, never silence.

    defaults below  <  configs/mpt1b.py  <  more files  <  --lr=1e-4 --compile

A config file is flat Python assignments that may compute; names that start with `_` are its helpers:

    _gpus = 8
    microbatch_size = 4
    global_batch_size = 16 * microbatch_size * _gpus

Field names are unique over all classes, so a flag needs no prefix. Run `python config.py --help` for the list.
This file imports no torch, so that a wrong flag is answered at once. Read next: devices.py.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
import re
import runpy
import sys
import threading
import types
import typing
from dataclasses import dataclass
from typing import Literal

# Re-exported: a file that has settings takes these from here.
from program import (  # noqa: F401
    UserError,
    arguments,
    flushed,
    one_line,
    rank,
    require,
    run,
    say_error,
    show_help,
    wants_help,
)

# What each number can be meant to be, from the smallest to the largest; anything else is a slip.
RANGES = {
    name: (low, high)
    for low, high, names in [
        (1, 2**20, "d_model"),
        (1, 2**16, "n_heads kv_n_heads"),
        (1, 10**4, "n_layers recompute_every"),
        (1, 2**24, "max_seq_len vocab_size"),
        (1e-3, 128, "expansion_ratio alibi_bias_max"),  # 2^-128 is about the smallest fp32 number
        (1e-9, 10**6, "softmax_scale logit_scale"),
        (0, 0.99, "emb_pdrop attn_pdrop resid_pdrop"),
        (0, 10**18, "seed"),
        (1e-9, 0.5, "val_fraction"),
        (1, 10**6, "global_batch_size microbatch_size keep_last max_bad_steps"),
        (1, 10**15, "max_steps eval_tokens rope_theta"),
        (
            0,
            10**15,
            "max_tokens warmup_steps eval_interval icl_interval icl_limit save_interval keep_every",
        ),
        (1e-12, 1000, "lr"),
        (0, 1, "alpha_f decoupled_weight_decay z_loss"),
        (0, 0.999999, "beta1 beta2"),
        (1e-30, 1, "adam_eps"),  # 0 would divide by 0 where there is no gradient
        (0, 10**6, "clip_qkv grad_clip save_minutes shard_size"),
        (1e-3, 10**6, "timeout_minutes peak_tflops"),
    ]
    for name in names.split()
}
LARGEST = 10**13  # parameters
PATIENCE = 5  # seconds after which a config file that still runs is named


@dataclass
class MPTConfig:
    """The model: what decides its weights and its logits. Names and defaults are MPT's."""

    d_model: int = 2048  # width of the residual stream
    n_heads: int = 16  # attention heads (queries)
    n_layers: int = 24  # transformer blocks
    expansion_ratio: float = 4  # hidden width of the feed-forward / d_model
    max_seq_len: int = 2048  # tokens of one training sequence
    vocab_size: int = 50368  # rows of the embedding, at least the tokenizer's entries
    learned_pos_emb: bool = True  # add a learned vector per position (ALiBi and RoPE turn it off)
    alibi: bool = False  # attention with linear biases instead of learned positions
    alibi_bias_max: float = 8  # the steepest ALiBi slopes: 2^(-i * alibi_bias_max / n_heads)
    rope: bool = False  # rotary positions: q and k are turned by angles that grow with the position
    rope_theta: float = 10000.0  # their longest wavelength / 2 pi
    attn_uses_sequence_id: bool = False  # the documents of one row do not see each other
    kv_n_heads: int | None = (
        None  # heads of keys and values: None = n_heads, 1 = multi-query, between = grouped
    )
    no_bias: bool = False  # True: no bias anywhere, the norms' included
    clip_qkv: float | None = (
        None  # clamp the output of Wqkv to [-clip_qkv, clip_qkv] (0 or None: do not)
    )
    qk_ln: bool = False  # LayerNorm over all of q and all of k
    softmax_scale: float | None = None  # None = 1 / sqrt(head_dim)
    logit_scale: float | Literal["inv_sqrt_d_model"] | None = None  # multiply the logits
    tie_word_embeddings: bool = True  # the output layer is the embedding, transposed
    emb_pdrop: float = 0.0  # dropout after the embedding
    attn_pdrop: float = 0.0  # dropout on the attention probabilities
    resid_pdrop: float = 0.0  # dropout after attention and after the feed-forward
    norm_type: Literal["low_precision_layernorm", "layernorm"] = (
        "low_precision_layernorm"  # norm in bf16, or in fp32
    )
    attn_impl: Literal["auto", "reference", "blocks", "sdpa", "flex", "triton"] = (
        "auto"  # see attention.py
    )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads if self.kv_n_heads is None else self.kv_n_heads

    @property
    def hidden_dim(self) -> int:
        return int(self.d_model * self.expansion_ratio)

    @property
    def learned_positions(self) -> bool:
        return self.learned_pos_emb and not (self.alibi or self.rope)

    def check(self) -> None:
        check_ranges(self)
        require(
            self.hidden_dim > 0, f"expansion_ratio {self.expansion_ratio} leaves no hidden width"
        )
        size = self.n_layers * self.d_model * (4 * self.d_model + 2 * self.hidden_dim)
        size += self.vocab_size * self.d_model
        require(
            size <= LARGEST, f"the model has {size:.0e} parameters, expected at most {LARGEST:.0e}"
        )
        require(
            self.d_model % self.n_heads == 0,
            f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}",
        )
        require(
            self.n_heads % self.n_kv_heads == 0,
            f"n_heads {self.n_heads} is not a multiple of kv_n_heads {self.n_kv_heads}",
        )
        require(
            not (self.rope and self.alibi),
            "rope and alibi are two ways to tell positions: set one of them",
        )
        even = not self.rope or self.head_dim % 2 == 0
        require(
            even,
            f"rope turns pairs of numbers: a head dim of {self.head_dim} is odd, change n_heads",
        )
        fused = self.attn_impl in ("flex", "triton")
        require(
            not (fused and self.attn_pdrop),
            f"attn_impl={self.attn_impl} has no dropout: set attn_pdrop=0",
        )
        small = self.attn_impl != "triton" or self.head_dim <= 128
        require(
            small,
            f"attn_impl=triton has head dims up to 128, not {self.head_dim}: take sdpa, or more heads",
        )


Checkpointing = Literal["none", "selective", "full"]  # of activations: see parallel.py
Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "ZERO1", "DDP"]


@dataclass(frozen=True)
class ShardingMode:
    """What a mode shards, and when. parallel.py does it, planning counts its bytes and seconds."""

    over: Literal["all", "group", "none"]  # data-parallel ranks that share one copy of the weights
    frees_weights: bool  # a block's gathered weights go after its forward, and are gathered again
    reduces_late: bool  # gradients are reduced at the last microbatch of a step only


SHARDING_MODES = {
    "FULL_SHARD": ShardingMode(over="all", frees_weights=True, reduces_late=False),
    "SHARD_GRAD_OP": ShardingMode(over="all", frees_weights=False, reduces_late=False),
    "HYBRID_SHARD": ShardingMode(over="group", frees_weights=True, reduces_late=False),
    "ZERO1": ShardingMode(over="all", frees_weights=False, reduces_late=True),
    "DDP": ShardingMode(over="none", frees_weights=False, reduces_late=True),
}


@dataclass
class TrainConfig:
    """The run: data, batch, optimizer, machine, checkpoints."""

    run_dir: str = "runs/mpt"  # folder of this run: settings, metrics, checkpoints
    init_from: str = (
        ""  # weights to begin with: a Hugging Face folder, a Composer .pt, a run or a checkpoint
    )
    seed: int = 1337  # of the initial weights, the data order and dropout
    # data
    dataset: str = (
        "stdlib"  # stdlib, local files (my/*.txt, .jsonl, .parquet), or a Hub name (allenai/c4:en)
    )
    tokenizer: str = "gpt2"  # gpt2, bytes, bpe-N (a BPE of N entries trained on the data set), or a tokenizer.json
    data_dir: str = ""  # folder of the prepared tokens; empty = data/<dataset>-<tokenizer>
    max_tokens: int = 0  # prepare at most this many training tokens (0 = all there are)
    val_fraction: float = 0.005  # share of the documents kept for validation
    # batch: global_batch_size = microbatch_size x ranks x accumulation steps, in sequences
    global_batch_size: int = 256  # sequences per optimizer step, over all ranks
    microbatch_size: int | Literal["auto"] = (
        8  # sequences per forward pass of one rank, at most (auto: what fits)
    )
    max_steps: int = 4800  # optimizer steps
    # optimizer
    lr: float = 6e-4  # peak learning rate
    schedule: Literal["cosine", "constant", "inv_sqrt"] = "cosine"  # after the warmup
    warmup_steps: int = 100  # steps of linear warmup
    alpha_f: float = 0.1  # cosine ends at alpha_f * lr
    lr_one_step_late: bool = (
        False  # apply the schedule as Composer does: step k uses the factor of k-1
    )
    beta1: float = 0.9  # Adam: decay of the mean of the gradient
    beta2: float = 0.95  # Adam: decay of the mean of its square
    adam_eps: float = 1e-8  # Adam: added to the denominator
    decoupled_weight_decay: float = 0.0  # p *= 1 - (lr_t / lr) * this: not PyTorch's weight_decay
    grad_clip: float = 1.0  # clip the global gradient norm to this (0 = never)
    z_loss: float = (
        0.0  # add this times the squared logsumexp of the logits to the training loss (PaLM: 1e-4)
    )
    # machine
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # cuda is ROCm too
    precision: Literal["auto", "fp32", "bf16"] = (
        "auto"  # auto: bf16 on accelerators, the faster one on a CPU
    )
    sharding: Sharding = "FULL_SHARD"  # see parallel.py
    shard_size: int = (
        0  # HYBRID_SHARD: ranks that share one copy of the weights (0 = the ranks of a node)
    )
    activation_checkpointing: Checkpointing = "none"  # see parallel.py
    recompute_every: int = 1  # activation checkpointing of every k-th block
    compile: bool = False  # torch.compile each block
    peak_tflops: float | Literal["auto", "measure"] = (
        "auto"  # of one device, for MFU; auto: the table of devices.py
    )
    # evaluation, checkpoints
    eval_interval: int = (
        500  # steps between evaluations on the validation split (0 = only first and last)
    )
    eval_tokens: int = 1_000_000  # validation tokens of one evaluation, at most
    icl_interval: int = 0  # steps between evaluations on icl_tasks (0 = never)
    icl_tasks: str = ""  # zero-shot tasks: piqa,my/task.jsonl, ... see evaluation/tasks.py
    icl_limit: int = 0  # items of each task, at most (0 = all)
    save_interval: int = 500  # steps between checkpoints (0 = only the last)
    save_minutes: float = 0.0  # and minutes between them, at most (0 = no limit)
    keep_last: int = 3  # newest checkpoints kept
    keep_every: int = 0  # and those of every so many steps, for good (0 = none)
    resume: str = "auto"  # auto: go on from run_dir; again: also restart a finished run; never; or a checkpoint
    expect: str = ""  # what a good run ends with: printed beside the result
    # staying alive: see lifecycle/stopping.py
    skip_steps: str = ""  # leave out these steps and their batches: 120:140 is 120 to 139, as metrics.jsonl counts
    max_bad_steps: int = (
        10  # so many steps in a row without a finite loss and gradient stop the run
    )
    timeout_minutes: float = (
        30.0  # without a step (evaluation included) end the run, naming the rank that hangs
    )

    def check(self) -> None:
        check_ranges(self)
        plain = self.run_dir.strip() and self.run_dir.isprintable()
        require(
            plain,
            f"run_dir is {shown(self.run_dir)}, expected the name of a folder, such as runs/NAME",
        )
        taken = os.path.exists(self.run_dir) and not os.path.isdir(self.run_dir)
        require(not taken, f"run_dir {self.run_dir} is there and no folder: set another --run_dir")
        require(
            self.icl_tasks or not self.icl_interval,
            "icl_interval wants tasks: set --icl_tasks=piqa, or a .jsonl",
        )
        step_ranges(self.skip_steps)
        require(
            self.schedule != "cosine" or self.warmup_steps < self.max_steps,
            f"warmup_steps {self.warmup_steps} must be below max_steps {self.max_steps}",
        )

    @property
    def sharding_mode(self) -> ShardingMode:
        return SHARDING_MODES[self.sharding]

    def shard_ranks(self, ranks: int, node: int) -> int:
        """How many of `ranks` data-parallel ranks share one copy of the weights.
        node: how many of them a node has."""
        return {"all": ranks, "group": self.shard_size or node, "none": 1}[self.sharding_mode.over]


def check_ranges(settings) -> None:
    """UserError naming the first number of a dataclass that is outside its range; NaN always is."""
    for name, value in vars(settings).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            low, high = RANGES.get(name, (-sys.float_info.max, sys.float_info.max))
            wanted = f"{name} must be from {shown(low)} to {shown(high)}"
            require(low <= value <= high, f"{wanted}, not {shown(value)}")


def shown(value) -> str:
    """A value in a message, 80 characters at most. Python refuses to print a whole number of 5,000 digits."""
    if type(value) is int:
        return (
            f"{value:,}"
            if abs(value) < 10**60
            else f"a number of {math.log10(abs(value)):.0f} digits"
        )
    return repr(value)[:80]


def step_ranges(text: str) -> list[range]:
    """`"120:140,300:310"`, counted from 1 as in metrics.jsonl -> ranges of steps counted from 0. Raises UserError."""
    ranges = []
    for part in text.split(",") if text else []:
        ends = re.fullmatch(r"\s*(\d{1,15}):(\d{1,15})\s*", part)
        require(
            ends and 0 < int(ends[1]) < int(ends[2]),
            f"skip_steps wants steps a:b, such as 120:140 for 120 to 139, not {shown(part)}",
        )
        ranges.append(range(int(ends[1]) - 1, int(ends[2]) - 1))
    return ranges


# Names that people bring from other projects, and what they are called here.
ELSEWHERE = {
    "block_size": "max_seq_len",
    "seq_len": "max_seq_len",
    "n_positions": "max_seq_len",
    "n_embd": "d_model",
    "hidden_size": "d_model",
    "n_head": "n_heads",
    "n_layer": "n_layers",
    "learning_rate": "lr",
    "max_iters": "max_steps",
    "max_duration": "max_steps",
    "warmup_iters": "warmup_steps",
    "lr_decay_iters": "max_steps",
    "out_dir": "run_dir",
    "save_folder": "run_dir",
    "batch_size": "microbatch_size",
    "device_train_microbatch_size": "microbatch_size",
    "global_train_batch_size": "global_batch_size",
    "sharding_strategy": "sharding",
    "dtype": "precision",
}


# Settings that were called something else: old name -> today's. Both are understood, in what people
# type and in what runs have saved; only today's is written.
RENAMED = {"checkpoint_every": "recompute_every"}

# What a checkpoint says of itself among its settings.
BESIDE_SETTINGS = {"step", "data_fingerprint", "optimizer"}


def load(argv: list[str], *classes: type, takes: str | None = None) -> list:
    """Fill `classes` from defaults < config files < flags.

    argv: config file paths and `--key=value` flags in any order; `--key` alone sets a boolean,
    and a list grows each time that its flag is given.
    takes: what a program wants in place of config files, as in `arguments`: "RUN", "FILE OUT". There
    `--key value` is `--key=value`.
    Returns one instance per class; with `takes`, the list of those arguments comes first.
    Raises UserError naming the source, the key and the fix.
    """
    if wants_help(argv):
        show_help(help_text(*classes, files=takes is None))
    known = {f.name: f for c in classes for f in dataclasses.fields(c)}
    types_ = {name: hint for c in classes for name, hint in typing.get_type_hints(c).items()}
    every = {
        f.name for c in (MPTConfig, TrainConfig) for f in dataclasses.fields(c)
    }  # a file may serve many programs
    values, strangers = {}, []
    if takes is not None:
        argv = joined(argv, types_)
    words = [a for a in argv if not a.startswith("-")]
    for path in words if takes is None else []:
        of_file = read_file(path)
        require_one_name(of_file, path)
        for key, value in of_file.items():
            key = todays_name(key, path, every | known.keys())
            if key in known:
                values[key] = checked(value, types_[key], key, path)
            elif key not in every:
                strangers.append((key, path, value))
    flags = [a.lstrip("-").partition("=") for a in argv if a.startswith("-")]
    require_one_name([key for key, _, _ in flags], "the command line")
    for key, equals, text in flags:
        key = todays_name(key, "the command line", known)
        if key not in known:
            strangers.append((key, "the command line", text))
            continue
        if not equals:
            require(
                types_[key] is bool, f"--{key} wants a value: --{key}=... ({expected(types_[key])})"
            )
            text = "true"
        value = checked(parse(text, types_[key]), types_[key], key, "the command line")
        values[key] = values.get(key, []) + value if types_[key] == list[str] else value
    for key, source, value in strangers:
        raise UserError(
            unknown(key, source, value, known if source == "the command line" else every, values)
        )
    instances = [] if takes is None else [with_usage(words, takes)]
    for c in classes:
        instance = c(**{f.name: values[f.name] for f in dataclasses.fields(c) if f.name in values})
        if hasattr(instance, "check"):
            instance.check()
        instances.append(instance)
    return instances


def joined(argv: list[str], types_: dict) -> list[str]:
    """argv with `--key value` as `--key=value`, where the key is one that wants a value."""
    words, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        wants_value = word.startswith("--") and types_.get(word[2:], bool) is not bool
        if wants_value and rest and not rest[0].startswith("--"):
            word = f"{word}={rest.pop(0)}"
        words.append(word)
    return words


def with_usage(words: list[str], takes: str) -> list[str]:
    """`arguments` of a program that has settings, too."""
    try:
        return arguments(words, takes)
    except UserError as error:
        raise UserError(f"{error} [--key=value ...] (--help lists the settings)") from error


def todays_name(key: str, source: str, known) -> str:
    """Today's name of a setting that was typed under an old one, and rank 0 says so. Else `key`."""
    name = RENAMED.get(key)
    if name not in known:
        return key
    say_once("note", f"{key} in {source} is called {name} now")
    return name


def require_one_name(names, source: str) -> None:
    """UserError if a setting is there twice, under its old name and under today's."""
    for old, new in RENAMED.items():
        both = old in names and new in names
        require(not both, f"{source} sets {old} and {new}, its new name: leave out {old}")


@functools.cache
def say_once(head: str, words: str) -> None:
    """A line on standard error from rank 0, however often this process comes here."""
    if rank() == 0:
        say_error(words, head)


def read_file(path: str) -> dict:
    """The assignments of a config file, without helpers (`_name`) and imported modules."""
    require(
        os.path.isfile(path),
        f"no config file {path!r} (flags are written --key=value){near_file(path)}",
    )
    line = f"{path} is still running after {PATIENCE} s: if it does not end, press Ctrl-C"
    slow = threading.Timer(
        PATIENCE, lambda: rank() == 0 and print(line, file=sys.stderr, flush=True)
    )
    slow.daemon = True
    slow.start()
    try:
        refuse_idle_lines(path)
        names = runpy.run_path(path)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too: a config file that ends the program
        raise UserError(
            f"{path} does not run: {type(error).__name__}: {one_line(error)}"
        ) from error
    finally:
        slow.cancel()
    return {
        k: v
        for k, v in names.items()
        if not k.startswith("_") and not isinstance(v, types.ModuleType)
    }


def refuse_idle_lines(path: str) -> None:
    """UserError for lines that set nothing: `d_model: 64` as in YAML, `{"d_model": 64}` as in JSON, `d_model == 64`."""
    with open(path, "rb") as file:
        lines = ast.parse(file.read(), path).body
    for line in lines:
        where = f"{path}, line {line.lineno}: "
        if isinstance(line, ast.AnnAssign) and line.value is None:
            name, value = ast.unparse(line.target), ast.unparse(line.annotation)
            raise UserError(f"{where}'{name}: {value}' sets nothing, write {name} = {value}")
        idle = isinstance(line, ast.Expr) and not isinstance(line.value, ast.Call | ast.Constant)
        require(not idle, f"{where}{shown(ast.unparse(line))} sets nothing, write key = value")


def near_file(path: str) -> str:
    """A hint with the config file whose name is nearest, or nothing."""
    folder = os.path.dirname(path) or "configs"
    there = [os.path.join(folder, f) for f in os.listdir(folder)] if os.path.isdir(folder) else []
    near = difflib.get_close_matches(path, set(there) - {path}, n=1)
    return f", did you mean {near[0]}?" if near else ""


def unknown(key: str, source: str, value, names, values: dict) -> str:
    """The message for a key that we do not have: the name that we use for it, or the nearest one."""
    if key == "weight_decay":
        lr = values.get("lr", TrainConfig.lr)
        try:
            same = f"{float(value) * lr:.3g}"
        except (TypeError, ValueError, OverflowError):
            same = "weight_decay * lr"
        return (
            f"unknown key 'weight_decay' in {source}: PyTorch multiplies it by lr, MPT's decay is decoupled from it. "
            f"The same decay here, at lr {lr:g}: decoupled_weight_decay={same}"
        )
    name = ELSEWHERE.get(key) or next(iter(difflib.get_close_matches(key, names, n=1)), None)
    return f"unknown key {key!r} in {source}, " + (
        f"did you mean {name!r}?" if name else "see --help for the names"
    )


def alternatives(hint) -> tuple:
    """The members of a union, or the one type itself."""
    return (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )


def parse(text: str, hint):
    """Text of a flag -> a Python value of the first type of `hint` that takes it, else the text itself."""
    options = alternatives(hint)
    if hint == list[str]:
        return [text]
    if text.lower() == "none" and type(None) in options:
        return None
    if bool in options and text.lower() in ("true", "false", "1", "0", "yes", "no"):
        return text.lower() in ("true", "1", "yes")
    if int in options or float in options:
        try:
            return int(text)
        except ValueError:
            try:
                return float(text)
            except ValueError:
                pass
    return text


def checked(value, hint, key: str, source: str):
    """`value` as the type `hint` wants it (1e9 for an int, 1 for a float, any case for a choice), or UserError."""
    for option in alternatives(hint):
        if typing.get_origin(option) is Literal:
            for choice in typing.get_args(option):
                if isinstance(value, str) and value.lower() == choice.lower():
                    return choice
        elif option == list[str]:
            if isinstance(value, list) and all(isinstance(text, str) for text in value):
                return value
        elif option is float and isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) <= sys.float_info.max:  # not NaN, not infinite, no whole number beyond
                return float(value)
        elif option is int and isinstance(value, float) and value.is_integer():
            return int(value)
        elif isinstance(value, option) and not (isinstance(value, bool) and option is not bool):
            return value
    raise UserError(f"{key} in {source} is {shown(value)}, expected {expected(hint)}")


def expected(hint) -> str:
    """A type in a user's words: `a number`, `one of: auto, cpu`, `a whole number or none`."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "none",
    }
    words[list[str]] = "text"
    return " or ".join(
        words.get(o) or "one of: " + ", ".join(typing.get_args(o)) for o in alternatives(hint)
    )


def help_text(*classes: type, files: bool = True) -> str:
    """Every field with its default and the comment that stands beside it in the source.

    files: does the program take config files?
    """
    lines = ["settings: --key=value" + (", or key = value in a config file" if files else "")]
    for c in classes:
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(c), re.MULTILINE))
        lines += ["", (c.__doc__ or c.__name__).strip().splitlines()[0]]
        for f in dataclasses.fields(c):
            hint = typing.get_type_hints(c)[f.name]
            default = f.default if f.default is not dataclasses.MISSING else ""  # an empty list
            lines.append(f"  --{f.name}={default}".ljust(40) + f" {comments.get(f.name, '')}")
            if "one of" in expected(hint):
                lines.append(" " * 41 + f"[{expected(hint)}]")
    return "\n".join(lines)


def to_json(*configs) -> str:
    """All fields of the configs as one JSON object."""
    return json.dumps({k: v for c in configs for k, v in dataclasses.asdict(c).items()}, indent=2)


def renamed(values: dict, source: str) -> dict:
    """Saved settings under today's names. UserError if one is there under both names."""
    require_one_name(values, source)
    return {RENAMED.get(key, key): value for key, value in values.items()}


def from_dict(cls: type, values: dict, source: str = "the saved settings"):
    """An instance of `cls` from what was saved, without the keys of other classes.

    Settings that no class has, such as those of a newer version, are left out, too. Rank 0 names
    them: nobody can know whether the model is the same without them. UserError if a value is wrong.
    """
    values = renamed(values, source)
    hints = typing.get_type_hints(cls)
    known = {f.name for c in (MPTConfig, TrainConfig, cls) for f in dataclasses.fields(c)}
    unknown_keys = [key for key in values if key not in known and key not in BESIDE_SETTINGS]
    if unknown_keys:
        named = ", ".join(map(shown, unknown_keys[:5])) + (", ..." if len(unknown_keys) > 5 else "")
        words = f"{source} has settings that are unknown here and left out: {named}"
        hint = "If they decide what the model computes, it is another model here"
        say_once("warning", f"{words}. {hint}")
    instance = cls(
        **{k: checked(values[k], hint, k, source) for k, hint in hints.items() if k in values}
    )
    instance.check()
    return instance


if __name__ == "__main__":
    run(lambda argv: print(to_json(*load(argv, MPTConfig, TrainConfig))))

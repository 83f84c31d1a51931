"""The parser of settings: fills dataclasses from defaults, config files and flags.

A later source wins over an earlier one:

    the dataclass's defaults  <  configs/mpt1b.py  <  more files  <  --lr=1e-4 --compile

A config file is Python: flat assignments, which may compute. Names that start with `_` are local to
the file. Names of settings are unique over all dataclasses, so a flag needs no prefix:

    @dataclass
    class CakeArgs:
        eggs: Int[1, 12] = 4  # the comment is what --help says

    (args,) = config.load(argv, CakeArgs)

The settings of the trainer are in config.py. Nothing here imports torch.
"""

import ast
import dataclasses
import difflib
import inspect
import os
import re
import runpy
import sys
import types
import typing
from typing import Annotated, Literal

import program
from program import UserError, quote


class Int:
    """`Int[1, 10]`, as the type of a setting: a whole number from 1 to 10.

    A default may lie outside: 0 often stands for "not set".
    """

    def __class_getitem__(cls, limits):
        return Annotated[(int, *limits)]


class Float:
    """`Float[0, 0.5]`: a number from 0 to 0.5."""

    def __class_getitem__(cls, limits):
        return Annotated[(float, *limits)]


# --------------------------------------------------------------------------------------------------
# Names

# What nanoGPT, nanochat, LLM Foundry and Hugging Face call our settings and linear layers.
FOREIGN_NAMES = {
    "d_model": "n_embd hidden_size",
    "n_layers": "depth",
    "max_seq_len": "block_size",
    "sliding_window_size": "sliding_window",
    "ffn_act_fn": "hidden_act",
    "lr": "learning_rate",
    "max_steps": "max_iters lr_decay_iters num_iterations max_duration",
    "microbatch_size": "batch_size device_batch_size device_train_microbatch_size",
    "global_batch_size": "global_train_batch_size",
    "precision": "dtype",
    "run_dir": "save_folder",
    "Wqkv": "q_proj k_proj v_proj qkv_proj qkv query_key_value c_attn",
    "out_proj": "o_proj c_proj dense",
    "up_proj": "gate_up_proj c_fc fc1 fc_in dense_h_to_4h w1",
    "down_proj": "fc2 fc_out dense_4h_to_h w2",
    "all": "all-linear",
}

# Settings that had another name here: old -> new. Config files, flags and saved settings may use
# either; we write only the new one.
RENAMED = {"checkpoint_every": "recompute_every"}

# Settings that are gone: name -> why. Config files and saved settings may still have them.
REMOVED = {"data_cache_gb": "a data set in a store is copied as a whole to --data_cache now"}

# Texts that are no paths; of others, parts separated by commas may be paths on this machine.
PROSE = ("prompt", "stop", "delimiter", "expect", "sbatch_args")
ADDRESSES = ("remote", "data_dir")  # settings that take the address of a store


def rename_keys(values: dict) -> dict:
    """Settings under today's names."""
    return {RENAMED.get(key, key): value for key, value in values.items()}


def explain_unknown(key: str, source: str, names) -> str:
    """The message for an unknown key, with our name for the same thing or the closest match."""
    message = f"unknown key {key!r} in {source}"
    if key == "weight_decay" and "decoupled_weight_decay" in names:
        fix = "decoupled_weight_decay = weight_decay * lr is the same decay here"
        return f"{message}: PyTorch multiplies it by lr, MPT does not. {fix}"
    if key in REMOVED:
        return f"{message}: {REMOVED[key]}"
    if key in ("tp", "pp"):
        return f"{message}: this program does not cut a model that way"
    near = nearest_name(key, names)
    return f"{message}, " + (f"did you mean {near!r}?" if near else "see --help for the names")


def nearest_name(word: str, names) -> str | None:
    """The one of `names` that others call by this word, or else the one most like it."""
    for name in names:
        if word in FOREIGN_NAMES.get(name, "").split():
            return name
    return next(iter(difflib.get_close_matches(word, names, n=1)), None)


def split_names(key: str, text: str, names) -> list[str]:
    """The words of a setting such as "norms,biases". UserError for one that is not in `names`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in names:
            near = nearest_name(word, names)
            hint = f"did you mean {near!r}? It can be" if near else "expected"
            raise UserError(f"{key}: {quote(word)} is not known, {hint} {', '.join(names)}")
    return words


# --------------------------------------------------------------------------------------------------
# Loading


def load(argv: list[str], classes, takes: str | None = None, elsewhere=()) -> list:
    """Fill `classes` from defaults < config files < flags, and check them. Returns the instances.

    argv: files and flags in any order. Of two files, or two flags, the later one wins; a list grows
        with each flag.
    takes: what the program takes in place of config files, as in `program.arguments`: "RUN",
        "FILE OUT". Those arguments come first in the result.
    elsewhere: names of settings of other programs, which a config file may have, too.

    Raises UserError naming the source, the key and the fix. Only the settings ADDRESSES take
    addresses of stores.
    """
    if program.wants_help(argv):
        program.show_help(describe_settings(*classes, files=takes is None))
    hints = types_of(*classes)
    argv = join_flags(argv, *classes)
    paths = [word for word in argv if not word.startswith("-")]
    # Flags first: a word after a flag with a typo may be its value, not a file.
    flags = check_values(parse_flags(argv, hints), hints, "the command line")
    taken = []
    if takes is not None:
        more = "[--key=value ...] (--help lists the settings)"
        taken, paths = [program.arguments(paths, takes, more)], []

    ignored = [*elsewhere, *REMOVED]
    sources = [check_values(read_file(path), hints, path, ignored) for path in paths]
    values = {}
    for later in filter(None, [*sources, flags]):
        values.pop("expect", None)  # of the settings before
        for name, other in (("dataset", "mix"), ("mix", "dataset")):
            if later.get(name):
                values.pop(other, None)  # one replaces the other
        values |= later
    for name, value in values.items():
        if name not in (*PROSE, *ADDRESSES):
            program.require_local(name, value)
    return taken + [make(cls, values) for cls in classes]


def join_flags(argv: list[str], *classes: type) -> list[str]:
    """`--key value` -> `--key=value`, `--switch` -> `--switch=true`, old names -> today's.

    A value may begin with `-`.
    """
    hints = types_of(*classes)
    words = []
    rest = iter(argv)
    for word in rest:
        key, has_value, value = word.lstrip("-").partition("=")
        key = RENAMED.get(key, key)
        if word.startswith("-") and key in hints:
            if not has_value:
                is_switch = bool in members_of(hints[key])
                value = "true" if is_switch else next(rest, "--")
                if value.startswith("--"):
                    kind = describe_type(hints[key])
                    raise UserError(f"--{key} needs a value: --{key}=... ({kind})")
            word = f"--{key}={value}"
        words.append(word)
    return words


def parse_flags(argv: list[str], hints: dict) -> dict:
    """The value of each flag in argv, which is joined. A list gets one text of each flag."""
    values = {}
    for word in argv:
        if word.startswith("-"):
            key, _, text = word.lstrip("-").partition("=")
            hint = hints.get(key, str)
            if hint == list[str]:
                values.setdefault(key, []).append(text)
            else:
                values[key] = parse_text(text, hint)
    return values


def read_file(path: str) -> dict:
    """Run a config file and return its assignments, without `_names` and imported modules.

    Raises UserError if the file is missing, fails, or ends the program (`exit()`).
    """
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "configs"
        files = os.listdir(folder) if os.path.isdir(folder) else []
        near = nearest_name(path, [os.path.join(folder, file) for file in files])
        hint = f", did you mean {near}?" if near else ""
        raise UserError(f"no config file {path!r} (flags are written --key=value){hint}")
    try:
        require_assignments(path)
        names = runpy.run_path(path)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too
        reason = f"{type(error).__name__}: {program.one_line(error)}"
        raise UserError(f"{path} does not run: {reason}") from error

    settings = {}
    for name, value in names.items():
        if not name.startswith("_") and not isinstance(value, types.ModuleType):
            settings[name] = value
    return settings


def require_assignments(path: str) -> None:
    """Raise UserError for lines that look like settings but set nothing.

    `d_model: 64` as in YAML is an annotation to Python; `{"d_model": 64}` as in JSON and
    `d_model == 64` are expressions. Docstrings and calls such as print() are allowed.
    """
    with open(path, "rb") as file:
        statements = ast.parse(file.read(), path).body
    for node in statements:
        unused = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call | ast.Constant)
        if unused or (isinstance(node, ast.AnnAssign) and node.value is None):
            line = f"{path}, line {node.lineno}: {quote(ast.unparse(node))}"
            raise UserError(f"{line} sets nothing, write key = value")


def check_values(settings: dict, hints: dict, source: str, ignored=()) -> dict:
    """The settings under today's names, with their types. UserError for an unknown one.

    ignored: names that are left out.
    """
    values = {}
    for key, value in rename_keys(settings).items():
        if key in hints:
            values[key] = check_value(value, hints[key], key, source)
        elif key not in ignored:
            raise UserError(explain_unknown(key, source, [*hints, *ignored]))
    return values


def make(cls: type, values: dict):
    """A checked instance of a dataclass, from those of `values` that are its fields."""
    names = {field.name for field in dataclasses.fields(cls)}
    instance = cls(**{name: value for name, value in values.items() if name in names})
    check_ranges(instance)
    if hasattr(instance, "check"):
        instance.check()
    return instance


# --------------------------------------------------------------------------------------------------
# Values and their types

NO_MATCH = object()  # what `convert` returns if nothing fits; None would be a value
TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def types_of(*classes: type) -> dict:
    """Field name -> type, over all these dataclasses. Without ranges."""
    return {name: hint for cls in classes for name, hint in typing.get_type_hints(cls).items()}


def members_of(hint) -> tuple:
    """The members of a union type, or the one type itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def parse_text(text: str, hint):
    """The text of a flag as the Python value that a config file would hold.

    Text that does not fit `hint` is returned as it is; `check_value` then reports it.
    """
    members = members_of(hint)
    word = ({"none": None} | TRUTHS).get(text.lower(), text)
    if type(word) in members:
        return word
    return parse_number(text) if int in members or float in members else text


def parse_number(text: str):
    """The int or float that a text stands for, or the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_value(value, hint, key: str, source: str):
    """`value` converted to the type `hint`. Raises UserError if it does not fit.

    A whole float serves as an int (1e9), an int as a float, choices ignore case, and ~ is the home
    folder.
    """
    for member in members_of(hint):
        converted = convert(value, member)
        if converted is not NO_MATCH:
            return converted if key in PROSE else expand_home(converted)
    raise UserError(f"{key} in {source} is {quote(value)}, expected {describe_type(hint)}")


def convert(value, member):
    """`value` converted to one member of a union type, or NO_MATCH. A bool is not a number."""
    if typing.get_origin(member) is Literal:
        choices = {choice.lower(): choice for choice in typing.get_args(member)}
        return choices.get(str(value).lower(), NO_MATCH)
    if member == list[str]:
        is_list = isinstance(value, list) and all(isinstance(part, str) for part in value)
        return value if is_list else NO_MATCH
    if isinstance(value, bool):
        return value if member is bool else NO_MATCH
    if member is float and isinstance(value, int | float):
        finite = abs(value) <= sys.float_info.max  # false for NaN and huge integers
        return float(value) if finite else NO_MATCH
    if member is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, member) else NO_MATCH


def expand_home(value):
    """A text, or a list of texts, with the home folder for the ~ with which a path begins.

    A shell does so only at the beginning of a word, not in --run_dir=~/runs/demo.
    """
    if isinstance(value, list):
        return [expand_home(text) for text in value]
    if not isinstance(value, str):
        return value
    return ",".join(os.path.expanduser(path) for path in value.split(","))


def describe_type(hint) -> str:
    """A type in plain words: `a number`, `one of: auto, cpu`, `a whole number or none`."""
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    words |= {str: "text", list[str]: "text", type(None): "none"}
    names = []
    for member in members_of(hint):
        choices = ", ".join(map(str, typing.get_args(member)))
        unknown = f"a number with limits: write {getattr(member, '__name__', member)}[low, high]"
        names.append(words.get(member) or (f"one of: {choices}" if choices else unknown))
    return " or ".join(names)


def check_ranges(settings) -> None:
    """Raise UserError for the first number of a dataclass outside its range. NaN always is.

    A default passes.
    """
    for name, hint in typing.get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        low, high = range_of(hint)
        if is_number and not low <= value <= high and value != getattr(type(settings), name, None):
            problem = f"{name} must be from {quote(low)} to {quote(high)}"
            raise UserError(f"{problem}, not {quote(value)}")


def range_of(hint) -> tuple[float, float]:
    """The smallest and largest number of a type: (1, 10) of `Int[1, 10] | None`."""
    for member in members_of(hint):
        if typing.get_origin(member) is Annotated:
            return member.__metadata__
    return -sys.float_info.max, sys.float_info.max


# --------------------------------------------------------------------------------------------------
# --help


def describe_settings(*classes: type, files: bool = True) -> str:
    """Each setting with its default and the comment beside it in the source, under its group.

    files: whether the program takes config files.
    """
    lines = ["settings: --key=value" + (", or key = value in a config file" if files else "")]
    for cls in classes:
        lines += ["", (cls.__doc__ or cls.__name__).strip().splitlines()[0]]
        hints = types_of(cls)
        for line in source_of(cls):
            if heading := re.match(r"    # --- (.*)", line):
                lines += ["", heading[1]]
            elif (field := re.match(r"    (\w+): .*?(?:  # (.*))?$", line)) and field[1] in hints:
                name, comment = field.groups("")
                flag = f"  --{name}={getattr(cls, name, '')}"  # a list has no default here
                lines.append(f"{flag:<40} {comment}")
                choices = describe_type(hints[name])
                if "one of" in choices:
                    lines.append(f"{'':<41}[{choices}]")
    return "\n".join(lines)


def source_of(cls: type) -> list[str]:
    """The lines that define the fields of a dataclass, inherited ones first."""
    parts = filter(dataclasses.is_dataclass, reversed(cls.__mro__))
    return [line for part in parts for line in inspect.getsource(part).splitlines()]

"""Questions about Python's standard library, with answers: data for finetuning, made here.

    prompt      def get_paths(scheme, vars=None, expand=True):
    response      # 3 arguments

The demo has read such headers in its training, but no such answers: it goes on with more code. Each
header of a function in the library is one example, if it is short; equal ones count once.

Some are held out: no run learns from them, so their answers cannot be known by heart. Which ones
depends on a hash of the header alone. So a header stays where it is in every version of Python.

Run `python -m lessons.questions` to write data/questions/train.jsonl and held_out.jsonl. Then
finetune on them, and see what it brought: lessons/finetuned.py.
"""

import ast
import hashlib
import json
import shutil
from pathlib import Path

from program import arguments, run
from storage import files
from text import sources

FOLDER = Path("data/questions")
LONGEST = 60  # characters of a header
HELD_OUT = 25  # 1 header in so many


def headers() -> dict[str, int]:
    """The headers of all functions in the standard library -> how many arguments each takes."""
    found = {}
    for path in sources.stdlib_files():
        try:
            tree = ast.parse(Path(path).read_bytes())
        except SyntaxError:  # a file for tests of tools that read bad code
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                header = f"def {node.name}({ast.unparse(node.args)}):"
                found[header] = count(node.args)
    return {header: n for header, n in found.items() if len(header) <= LONGEST}


def count(args: ast.arguments) -> int:
    """The arguments of a function, with *args and **kwargs."""
    starred = [arg for arg in (args.vararg, args.kwarg) if arg]
    return len([*args.posonlyargs, *args.args, *args.kwonlyargs, *starred])


def as_example(header: str, n_arguments: int) -> dict[str, str]:
    """The prompt and the response about one function."""
    plural = "" if n_arguments == 1 else "s"
    return {"prompt": header, "response": f"  # {n_arguments} argument{plural}"}


def digest(header: str) -> int:
    """A number that depends on the header alone, and looks random."""
    return int.from_bytes(hashlib.sha256(header.encode()).digest(), "big")


def split(counts: dict[str, int]) -> tuple[list[dict], list[dict]]:
    """The examples to learn from and those held out, each in an order that looks random."""
    train, held_out = [], []
    for header in sorted(counts, key=digest):
        part = train if digest(header) % HELD_OUT else held_out
        part.append(as_example(header, counts[header]))
    return train, held_out


def write(folder: Path, counts: dict[str, int]) -> None:
    """Write train.jsonl and held_out.jsonl. Tokens of other questions are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, examples in zip(("train", "held_out"), split(counts), strict=True):
        path = folder / f"{name}.jsonl"
        lines = [json.dumps(example) for example in examples]
        content = "\n".join([*lines, ""]).encode()
        if not (path.exists() and path.read_bytes() == content):
            shutil.rmtree(folder / "tokens", ignore_errors=True)  # of configs/lora_demo.py
            files.write_atomically(path, content)
        print(f"{path}: {len(lines):,} questions, the first is {lines[0]}")


def main(argv) -> None:
    """Write the questions about the standard library."""
    arguments(argv)
    write(FOLDER, headers())


if __name__ == "__main__":
    run(main)

"""Where text comes from: the documents of a data set, one string each, always in the same order.

    stdlib                        the Python source on this machine: real text that needs no download
    notes.txt, 'my/*.jsonl', dir  local .txt, .jsonl, .parquet and .py files, in sorted order
    allenai/c4:en                 a data set (and subset) of the Hugging Face Hub, streamed

Run `python corpus.py stdlib` to see how many there are and how one begins. Read next: tokenizer.py.
"""

import glob
import json
import os
import re
import sysconfig
from pathlib import Path

import config
from config import UserError, require


def documents(dataset: str):
    """The documents of a data set. Raises UserError when it cannot be found or reached."""
    paths = files(dataset)
    texts = (text for path in paths for text in file_documents(path)) if paths else hub_documents(dataset)
    return (text for text in texts if text)


def files(dataset: str) -> list[str]:
    """The files that hold a data set; none if it lives on the Hub."""
    return stdlib_files() if dataset == "stdlib" else local_files(dataset)


def stdlib_files() -> list[str]:
    """Python's own library, about 730 files and 12 MB, without its tests and without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    return sorted(str(p) for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts))


def local_files(dataset: str) -> list[str]:
    """The files that a path, a folder or a glob names; none if `dataset` looks like the name of a Hub data set."""
    if os.path.exists(dataset):  # even with a [ in its name
        folder = os.path.isdir(dataset)
        dataset = os.path.join(glob.escape(dataset), "**", "*") if folder else glob.escape(dataset)
    paths = sorted(p for p in glob.glob(dataset, recursive=True) if p.endswith((".txt", ".jsonl", ".parquet", ".py")))
    named_locally = any(c in dataset for c in "*?[") or dataset.endswith((".txt", ".jsonl", ".parquet", ".py"))
    require(paths or not named_locally, f"dataset={dataset!r}: no .txt, .jsonl or .parquet file is there")
    return paths


def file_documents(path: str):
    """The documents of one file. .jsonl and .parquet: the field `text`; .py: the file.

    .txt: what stands between <|endoftext|>; when that is absent, pieces of about 16 kB that end at a blank line.
    """
    if path.endswith(".parquet"):
        import pyarrow  # comes with `datasets`
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.ParquetFile(path)
            columns = {field.name: str(field.type) for field in table.schema_arrow}
            right = columns.get("text") in ("string", "large_string", "string_view")
            require(right, f"{path} has no column 'text' of strings, only {columns}")
            for batch in table.iter_batches(columns=["text"]):
                yield from batch.column(0).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{path} is not a whole .parquet file: {' '.join(str(error).split())}") from error
    elif path.endswith(".jsonl"):
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    text = json.loads(line)["text"]
                    if not isinstance(text, str | None):
                        raise TypeError
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f'{path}, line {number}: expected one JSON object with a field "text"') from error
                yield text
    else:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        if path.endswith(".py"):
            yield text
        elif "<|endoftext|>" in text:
            yield from (part.strip() for part in text.split("<|endoftext|>") if part.strip())
        else:
            for match in re.finditer(r"(?s).{1,16384}(?:.{0,16384}?\n\s*\n|.*?\n|.*\Z)", text):
                yield match[0]


def hub_documents(dataset: str):
    """Stream the training split of `owner/name` or `owner/name:subset` from the Hugging Face Hub."""
    import datasets  # 1.5 s, so only where it is needed

    name, _, subset = dataset.partition(":")
    advice = "use local files (--dataset='my/*.txt') or --dataset=stdlib"
    try:
        stream = datasets.load_dataset(name, subset or None, split="train", streaming=True)
        for row in stream:
            require("text" in row, f"data set {dataset} has no field 'text', only {sorted(row)}")
            yield row["text"]
    except FileNotFoundError as error:
        raise UserError(f"dataset={dataset!r} is neither a file here nor a data set on the Hub: {advice}") from error
    except OSError as error:
        raise UserError(f"cannot reach the Hub for dataset={dataset!r}: {advice}, or try again online") from error
    except UserError:
        raise
    except ValueError as error:  # e.g. the subset is missing, and the message lists them
        raise UserError(f"dataset={dataset!r}: {' '.join(str(error).split())} (write it {name}:SUBSET)") from error


def main(argv) -> None:
    """Count the documents of a data set and show the beginning of one."""
    dataset = next(iter(config.arguments(argv, "[DATASET]")), "stdlib")
    count = size = 0
    for text in documents(dataset):
        count, size = count + 1, size + len(text)
    require(count > 0, f"dataset={dataset!r} holds no document")
    print(f"{dataset}: {count:,} documents, {size:,} characters; the last begins {text[:60]!r}")


if __name__ == "__main__":
    config.run(main)

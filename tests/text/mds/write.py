"""Writes the MDS folders beside it with MosaicML's own package, and reads others with it.

    pip install --no-deps mosaicml-streaming==0.13.0     in an environment of its own: it asks for
    pip install numpy torch transformers brotli zstd python-snappy xxhash catalogue pillow  old ones
    python write.py                                      makes the folders anew
    python write.py FOLDER                               prints the column `tokens` of a folder

`rows_of` says what the folders hold, without the package.
"""

import importlib.machinery
import json
import random
import sys
import types
from pathlib import Path

HERE = Path(__file__).parent
LENGTH = 32  # of a row
COMPRESSIONS = ("", "zstd", "zstd:19", "gz", "bz2", "br", "snappy")
KINDS = {  # of `tokens`: the encoding, the dtype of numpy
    "int32": ("ndarray:int32", "int32"),
    "int32-fixed": (f"ndarray:int32:{LENGTH}", "int32"),
    "int64": ("ndarray:int64", "int64"),
    "uint16": ("ndarray:uint16", "uint16"),
    "bytes-int64": ("bytes", "int64"),
    "bytes-int32": ("bytes", "int32"),
    "documents": ("ndarray:int32", "int32"),
}
HASHES = ["sha1", "xxh64"]


def rows_of(name: str) -> list[list[int]]:
    """The samples of a folder of ids. Of documents each has a length of its own."""
    draw = random.Random(name)
    lengths = [LENGTH] * 40
    if name == "documents":
        lengths = [draw.randrange(1, 300) for _ in range(12)]
    words = [draw.randrange(256) for _ in range(40)]
    return [[draw.choice(words) for _ in range(length)] for length in lengths]


def texts_of(name: str) -> list[str]:
    """The samples of a folder of texts."""
    draw = random.Random(name)
    words = "the a river tree größe 東京 old sings walks sees under slowly".split()
    return [" ".join(draw.choices(words, k=draw.randrange(1, 60))) for _ in range(20)]


def stub(name: str, **content) -> None:
    """A module in place of one that the package imports and does not need here."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(content)
    sys.modules[name] = module


def streaming():
    """The package."""
    stub("torchvision")
    stub("torchvision.datasets", VisionDataset=object)
    stub("torchvision.transforms")
    stub("torchvision.transforms.functional", to_tensor=None)
    import streaming

    return streaming


def write(folder, columns: dict, samples, **more) -> None:
    with streaming().MDSWriter(out=str(HERE / folder), columns=columns, **more) as out:
        for sample in samples:
            out.write(sample)


def main() -> None:
    import numpy as np

    for name, (encoding, dtype) in KINDS.items():
        rows = [np.array(row, dtype) for row in rows_of(name)]
        if encoding == "bytes":
            rows = [row.tobytes() for row in rows]
        samples = [{"tokens": row} for row in rows]
        write(name, {"tokens": encoding}, samples, size_limit=3000)
    for compression in COMPRESSIONS:
        name = compression.replace(":", "-") or "raw"
        samples = [{"tokens": np.array(row, "int32")} for row in rows_of(name)]
        more = {"compression": compression, "hashes": HASHES, "size_limit": 4000}
        write(name, {"tokens": "ndarray:int32"}, samples, **more)

    # Columns of strangers beside ours: before it, behind it, with and without a fixed size.
    columns = {"about": "pkl", "id": "int", "text": "str", "url": "str", "zeros": "ndarray:uint8:3"}
    zeros = np.zeros(3, np.uint8)
    samples = [
        {"about": {"n": n}, "id": n, "text": text, "url": "x" * n, "zeros": zeros}
        for n, text in enumerate(texts_of("text"))
    ]
    write("text", columns, samples, compression="zstd", size_limit=2000, hashes=["sha256"])

    for part in ("0", "1"):
        samples = [{"tokens": np.array(row, "int32")} for row in rows_of(f"merged/{part}")]
        write(f"merged/{part}", {"tokens": "ndarray:int32"}, samples, size_limit=3000)
    streaming().base.util.merge_index(str(HERE / "merged"))


def show(folder: str) -> None:
    """Print the rows of a folder as JSON."""
    data = streaming().LocalDataset(local=folder)
    print(json.dumps([data[i]["tokens"].tolist() for i in range(len(data))]))


if __name__ == "__main__":
    show(sys.argv[1]) if sys.argv[1:] else main()

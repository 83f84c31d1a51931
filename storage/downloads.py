"""Downloads: the only file that reaches for the internet.

    hub_dataset("allenai/c4", "en", "train")    a data set of the Hugging Face Hub
    gpt2_encoding()                             GPT-2's tokenizer files, which tiktoken fetches

Most compute nodes have no internet. On some a connection fails at once, on others packets vanish,
and then libraries try for minutes. So the server is asked first, and has five seconds to answer.
With HF_HUB_OFFLINE=1 nobody is asked: the libraries use the copies that they have.

Without an answer both raise ConnectionError, an OSError. The caller's message says what to copy,
and where.
"""

import hashlib
import os
import tempfile
import threading
from pathlib import Path

SECONDS = 5
GPT2_HOST = "https://openaipublic.blob.core.windows.net"
GPT2_FILES = {  # the SHA-1 of its address, which names it in tiktoken's cache -> its SHA-256
    # vocab.bpe
    "6d1cbeee0f20b3d9449abfede4726ed8212e3aee": (
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    ),
    # encoder.json
    "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6": (
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    ),
}


def hub_dataset(name: str, subset: str | None, split: str, streaming: bool = False):
    """A split of a data set of the Hub, or of a folder here that has its name.

    Raises OSError if it cannot be reached, ValueError if it has no such subset or split.
    """
    if not os.path.exists(name):
        require_answer(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    import datasets  # takes 1.5 s, so only where it is needed

    return datasets.load_dataset(name, subset, split=split, streaming=streaming)


def hub_cache() -> str:
    """The folder of all that the Hub's libraries have downloaded, with the data sets made of it."""
    from huggingface_hub import constants

    return constants.HF_HOME


def gpt2_encoding():
    """tiktoken's encoding of GPT-2. Raises OSError or ValueError if it cannot be fetched."""
    import tiktoken

    folder = gpt2_cache()
    if not all(has_sound(folder / name, sha256) for name, sha256 in GPT2_FILES.items()):
        if is_offline():
            raise ConnectionError("HF_HUB_OFFLINE is set")
        require_answer(GPT2_HOST)
    return tiktoken.get_encoding("gpt2")


def gpt2_cache() -> Path:
    """The folder in which tiktoken looks for its files."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    return Path(folder or Path(tempfile.gettempdir(), "data-gym-cache"))


def has_sound(path: Path, sha256: str) -> bool:
    """Is a file there, with this content?"""
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def is_offline() -> bool:
    """Is the internet not to be tried? By the variables of the Hub's libraries."""
    values = [os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")]
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def require_answer(url: str) -> None:
    """ConnectionError unless the server answers, through a proxy if one is set.

    Any answer will do, an error, too. In a thread, since looking up a name can take longer.
    """
    if is_offline():
        return  # the libraries know it, too
    answered = threading.Event()
    ask = threading.Thread(target=notice_answer, args=(url, answered), daemon=True)
    ask.start()
    ask.join(SECONDS)
    if not answered.is_set():
        raise ConnectionError(f"{url} does not answer")


def notice_answer(url: str, answered: threading.Event) -> None:
    """Set the event when the server of a URL answers."""
    import requests  # comes with tiktoken, which fetches its files with it

    try:
        requests.head(url, timeout=SECONDS)
    except requests.exceptions.SSLError:
        pass  # an answer; a library may have certificates of its own
    except (requests.ConnectionError, requests.Timeout):
        return
    answered.set()

"""Object stores: S3 and what speaks its protocol, Google, Azure; a folder, or memory for a try.

    store = open_store("s3://bucket/runs/my1b")
    store.upload("step-600/meta.json", "checkpoints/step-600/meta.json")    [bytes, crc32]
    store.download("checkpoints/step-600/meta.json", "meta.json", size, crc)
    store.sizes("checkpoints/step-600")                                     {name: bytes}

Keys are relative to the address. An object is whole or absent, and a list shows what is there now.
But there is no rename: what consists of several objects is published by writing the last one.

Bytes are checked in both directions. On the way up each request carries its SHA-256, and the
store refuses what does not fit. Downloads are checked by us alone, by crc32, as they come.

Every request is tried several times, unless the store refuses it for good. What then fails is a
StoreError of one line, by cause, or with the store's own reason. It names neither the server nor a
key. Credentials and endpoint come from the usual variables:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL; GOOGLE_..., AZURE_...
`~/.aws/credentials` is not read: `eval "$(aws configure export-credentials --format env)"`.

The client is obstore (requirements-extra.txt), imported when a store is opened.

Run `python -m storage.object_store s3://bucket/folder` to list what is there.
"""

import contextlib
import errno
import os
import random
import re
import time
import zlib
from datetime import timedelta
from pathlib import Path

import program
from program import UserError, require

PART = 8 << 20  # bytes of a request. At most 10,000 make a file: larger files have larger parts
BLOCK = 1 << 20  # bytes read or written at a time
TRIES = 4  # of each action,
RETRIES = 4  # in each of which the client repeats a request as often as this
PAUSE = 0.5  # seconds before the second try; each later pause is twice as long,
LONGEST_PAUSE = 20  # up to this

# What stands in an error of the client, and what it means. The first that matches counts.
MISSING = {
    "NoSuchBucket": "there is no such bucket: create it, or correct its name",
    "ContainerNotFound": "there is no such container: create it, or correct its name",
}
EXPIRED = "the temporary credentials have expired: set new ones, and start again"
PERMANENT = MISSING | {
    "169.254.169.254": "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "metadata.google.internal": "no credentials: set GOOGLE_APPLICATION_CREDENTIALS",
    "MissingAccount": "no credentials: set AZURE_STORAGE_ACCOUNT_NAME and its key",
    "InvalidAccessKeyId": "the store does not know this access key: set AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "wrong secret key: set AWS_SECRET_ACCESS_KEY",
    "RequestTimeTooSkewed": "this machine's clock is off: set it",
    "AccessDenied": "these credentials lack permission: allow list, read, write and delete",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
    "redirect without LOCATION": "the bucket is in another region: set AWS_REGION",
    "ExpiredToken": EXPIRED,
    "TokenRefreshRequired": EXPIRED,
    "InvalidToken": "the store does not know this session token: set AWS_SESSION_TOKEN",
    "os error 13": "no permission for this folder",
    "range was invalid": "the object is shorter than it was",
    "InvalidRange": "the object is shorter than it was",
}
PASSING = {
    "os error 28": "the disk is full",
    "BadDigest": "data was damaged on the way",
    "SlowDown": "the store asks for fewer requests",
    "503 Service": "the store is overloaded",
    "error sending request": "the store does not answer: check AWS_ENDPOINT_URL or its like",
    "operation timed out": "the store does not answer in time",
    "response body error": "the connection is cut again and again",
}
# Answers to a request that was wrong (4xx) but may be right the next time: damaged on the way, too
# late, in conflict with another one, too early, one too many.
TRY_AGAIN = ("400", "408", "409", "425", "429")
STATUS = re.compile(r"status (?:code: )?(\d{3} [A-Z][A-Za-z ]+)")
# The store's own reason: <Code>QuotaExceeded</Code><Message>The quota is used up</Message>
REASON = re.compile(r"(?s)(?:.*?<Code>(\w+)</Code>)?(?:.*?<Message>([ -;=-~]{1,200}))?")
BAD_NAME = re.compile(r'object with invalid path: .*?Path "(.*?)"')
# Variables with the address of a server, and what the client takes.
ENDPOINTS = re.compile("(AWS|AZURE|AZURE_STORAGE)_ENDPOINT(_URL|_URL_S3)?")
REGIONS = re.compile("AWS_(DEFAULT_)?REGION")
HTTP = re.compile(r"https?://[\w.:[\]-]+(/[\w./-]*)?", re.IGNORECASE)


class StoreError(UserError):
    """What a store refuses or fails at. The message is one line.

    passes: it may go away by itself, as an outage does.
    """

    def __init__(self, message: str, passes: bool = False):
        super().__init__(message)
        self.passes = passes


class DamagedObject(StoreError):
    """An object that does not have the size or hash in its checkpoint's list."""


def open_store(url: str, tries: int = TRIES) -> "Store":
    """The store at s3://bucket/path, gs://, az://container/path, file:///folder or memory://.

    tries: of each request, before its error is raised. It is not asked anything yet. UserError for
    another address, or without obstore.
    """
    return Store(url, tries)


def check_url(url: str) -> None:
    """UserError unless `open_store` knows such addresses."""
    examples = "expected s3://bucket/path, gs://..., az://... or file:///folder"
    kind, _, rest = url.partition("://")
    known = kind in ("s3", "gs", "az", "file", "memory") and url.isprintable()
    # Settings are stored and printed: a key must not be among them.
    plain = not re.search(r"[@?#%\s]|//|/\.\.?(/|$)", rest)
    if not known or not plain:
        shown = repr(url)[:80] if plain else f"no plain {kind} address"[:80]
        raise UserError(f"the store is {shown}: {examples}, without keys")
    named = rest.startswith("/") if kind == "file" else rest or kind == "memory"
    require(named, f"the store is {url!r}: {examples}")


class Store:
    """The objects below one address."""

    def __init__(self, url: str, tries: int = TRIES):
        check_url(url)
        check_variables(url)
        self.url, self.tries = url.rstrip("/"), tries
        self.is_down = False  # and has said so
        obstore = import_obstore()
        self.errors = obstore.exceptions
        # Many who ask patiently would ask an overloaded store too often if the client did so, too.
        retries = RETRIES if tries <= TRIES else 0
        self.client = self.attempt(lambda: connect(obstore, url, retries, read_timeout="20s"), "")
        # read_timeout counts while sending, too: it would end slow uploads.
        is_local = url.startswith(("file:", "memory:"))
        self.sender = self.client if is_local else connect(obstore, url, retries)

    # --- whole files

    def upload(self, path, key: str, expected=None) -> list[int]:
        """Copy a file to an object. Returns its bytes and crc32.

        expected: what these must be. UserError if they differ; then there is no object.
        """
        size = os.path.getsize(path)
        part = max(PART, -(-size // 9000))
        found = [0, 0]

        def send():
            blocks = file_blocks(path, expected, found)
            data = blocks if size > PART else b"".join(blocks)
            self.sender.put(key, data, chunk_size=part, max_concurrency=4)

        self.attempt(send, key)
        return found

    def download(self, key: str, path, size: int, crc: int | None = None) -> None:
        """Copy an object to a file, which has its name only once its size and crc32 are right.

        What an earlier try has left in PATH.part is continued. FileNotFoundError if there is no
        such object, OSError if the disk is full, StoreError if its content is another.
        """
        part = Path(f"{path}.part")
        for left in reversed(range(TRIES)):
            found = self.continue_part(key, part, size)
            if found == (size, found[1] if crc is None else crc):
                os.replace(part, path)
                return
            part.unlink()
            if left:
                time.sleep(PAUSE)
        raise DamagedObject(f"{self.url}: {key} is not what its list says: copy it there again")

    def continue_part(self, key: str, part: Path, size: int) -> tuple[int, int]:
        """Append to a file what it lacks of an object. Its bytes and crc32 then."""
        have, crc = 0, 0
        with open(part, "ab+") as file:
            file.seek(0)
            while block := file.read(BLOCK):
                have, crc = have + len(block), zlib.crc32(block, crc)
            for block in self.blocks(key, have, size):
                have, crc = have + len(block), zlib.crc32(block, crc)
                try:
                    file.write(block)
                    file.flush()
                except OSError as error:  # it does not name the file
                    raise OSError(error.errno, error.strerror, str(part)) from error
            os.fsync(file.fileno())
        return have, crc

    def blocks(self, key: str, start: int, stop: int):
        """The bytes from `start` to `stop` of an object in blocks, across interruptions."""
        tries = 0
        while start < stop:
            try:
                options = {"range": (start, stop)}
                for block in self.client.get(key, options=options).stream(min_chunk_size=BLOCK):
                    start, tries = start + len(block), 0
                    yield block
                return
            except (self.errors.BaseError, OSError) as error:
                tries += 1
                self.pause_or_raise(error, key, tries)

    # --- small objects

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The content of an object, or of a range of it. FileNotFoundError if it is not there."""
        options = {} if stop is None else {"options": {"range": (start, stop)}}
        return self.attempt(lambda: bytes(self.client.get(key, **options).bytes()), key)

    def put(self, key: str, content: bytes) -> None:
        """Write or replace an object."""
        self.attempt(lambda: self.client.put(key, content), key)

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless there is one. Of many who try at once, one gets True.

        content: unique to the caller. If an answer is lost, the client repeats its request, is
        refused, and knows by the content that it had won.
        """
        for _ in range(self.tries):
            if self.creates(key, content):
                return True
            with contextlib.suppress(FileNotFoundError):
                return self.get(key) == content
            time.sleep(PAUSE)  # refused, yet not there: another request was under way
        raise StoreError(f"{self.url}: the store refuses to create {key}, which it lacks", True)

    def creates(self, key: str, content: bytes) -> bool:
        """One conditional write: False if it is refused. Some stores ignore the condition.

        Only here "409 Conflict" may mean that there is an object. It may also mean that another
        request is under way.
        """

        def put():
            try:
                self.client.put(key, content, mode="create")
            except self.errors.AlreadyExistsError:
                return False
            return True

        return self.attempt(put, key)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """The objects below a prefix, which is a folder: name relative to it -> bytes."""
        found = self.attempt(lambda: self.client.list(prefix or None).collect(), prefix)
        begin = len(prefix.rstrip("/")) + 1 if prefix else 0
        return {entry["path"][begin:]: entry["size"] for entry in found}

    def delete(self, key: str) -> None:
        """Delete an object, if it is there."""
        try:
            self.attempt(lambda: self.client.delete(key), key)
        except FileNotFoundError:
            return

    # --- errors

    def attempt(self, action, key: str):
        """action(), again with growing pauses while it fails in a way that may pass."""
        tries = 0
        while True:
            try:
                result = action()
                if self.is_down:
                    self.is_down = False
                    print(f"{self.url} answers again", flush=True)
                return result
            except (self.errors.BaseError, FileNotFoundError) as error:
                tries += 1
                self.pause_or_raise(error, key, tries)

    def pause_or_raise(self, error: Exception, key: str, tries: int) -> None:
        """After a failed try: wait for the next one, or raise in our words."""
        text = str(error)
        if getattr(error, "filename", None):
            raise error  # a file of this machine
        if isinstance(error, FileNotFoundError) and not any(mark in text for mark in MISSING):
            raise FileNotFoundError(errno.ENOENT, "no such object", f"{self.url}/{key}") from None
        problem = f"{self.url}: {cause(text)}"
        if not may_pass(text) or tries >= self.tries:
            raise StoreError(problem, may_pass(text)) from error
        if tries == TRIES and not self.is_down:
            self.is_down = True
            program.print_error(f"{problem}. Trying again", "store")
        pause = min(LONGEST_PAUSE, PAUSE * 2 ** (tries - 1))
        time.sleep(pause * random.uniform(0.5, 1.5))


def may_pass(text: str) -> bool:
    """Whether an error of the client may go away by itself, as an outage does."""
    status = STATUS.search(text)
    is_refused = status and status[1].startswith("4") and not status[1].startswith(TRY_AGAIN)
    return not (is_refused or BAD_NAME.search(text) or any(mark in text for mark in PERMANENT))


def cause(text: str) -> str:
    """An error of the client in a few words: its own text has 40 lines, with addresses."""
    for mark, words in (PERMANENT | PASSING).items():
        if mark in text:
            return words
    if name := BAD_NAME.search(text):
        return f"the client cannot read the name of the object {name[1]!r}: rename or delete it"
    status = STATUS.search(text)
    reason = ": ".join(filter(None, REASON.search(text).groups()))
    answer = reason or (status and status[1].strip())
    return f"the store answers {answer}" if answer else "the store fails"


def check_variables(url: str) -> None:
    """UserError for an address or a region with which the client may crash."""
    for name, value in os.environ.items():
        require(
            not ENDPOINTS.fullmatch(name) or HTTP.fullmatch(value),
            f"{name} is not an address: set it to http://HOST:PORT or https://HOST, or unset it",
        )
        require(
            not (url.startswith("s3:") and REGIONS.fullmatch(name))
            or re.fullmatch(r"[\w.-]*", value, re.ASCII),
            f"{name} is not a region: set it to one such as us-east-1, or unset it",
        )


def import_obstore():
    """The client. UserError where it is not installed."""
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise UserError(f"object stores need obstore: {program.EXTRA}") from error
    return obstore


def connect(obstore, url: str, retries: int, **timeouts):
    """A client of obstore, with what its defaults get wrong."""
    kind, _, rest = url.partition("://")
    if kind == "memory":
        return obstore.store.MemoryStore()
    if kind == "file":
        return obstore.store.LocalStore(rest, mkdir=True, automatic_cleanup=True)
    more = {}
    if kind == "s3" and "AWS_CHECKSUM_ALGORITHM" not in os.environ:
        more["checksum_algorithm"] = "SHA256"  # without it a store keeps damaged uploads
    # `timeout` is for a whole request: 300 s let parts through at 0.3 MB/s.
    options = {"connect_timeout": "5s", "timeout": "300s", "allow_http": True} | timeouts
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=120)}
    return obstore.store.from_url(url, client_options=options, retry_config=retry, **more)


def file_blocks(path, expected, found: list[int]):
    """A file in blocks. `found` becomes [bytes, crc32].

    An error at its end, if it is not as expected, aborts the upload.
    """
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
            yield block
    found[:] = size, crc
    if expected is not None and found != list(expected):
        raise UserError(f"{path} is damaged on this disk: it was not uploaded")


def main(argv: list[str]) -> None:
    """List the objects below an address."""
    (url,) = program.arguments(argv, "s3://BUCKET/FOLDER")
    sizes = open_store(url).sizes()
    for name in sorted(sizes):
        print(f"{sizes[name]:>16,}  {name}")
    print(f"{sum(sizes.values()):>16,}  bytes in {len(sizes):,} objects")


if __name__ == "__main__":
    program.run(main)

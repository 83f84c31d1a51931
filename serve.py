"""Serve a model and its adapters over HTTP, with OpenAI's API: text and chat, whole or streamed.

    python serve.py runs/demo
    python serve.py runs/demo --adapters=runs --keys=keys.txt --host=0.0.0.0 --port=8000
    python serve.py runs/demo --jobs=jobs      and, elsewhere, python -m web.worker jobs
    python serve.py runs/demo --runs=runs      and a page that shows the curves of runs
    python serve.py --runs=runs                the page alone, without a model
    torchrun --nproc_per_node 8 serve.py runs/my70b --tp=8     too large for one device

RUN is a run folder, one checkpoint in it, or a Hugging Face folder. A request's `model` names it,
or an adapter of the folder --adapters: PEFT folders and finished runs with --lora_rank.

The walk of a request, file by file: web/README.md.
"""

import program

if __name__ == "__main__":  # before PyTorch is imported
    program.sleep_while_waiting()

import asyncio
import importlib.util
import ipaddress
import json
import os
import shlex
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

import config
import processes
from config import Int, MPTConfig
from flops import n_params
from program import EXTRA, UserError, require, shell
from serving.adapters import AdapterBank, read_adapter
from serving.catalog import Catalog
from serving.constraint import Constraints
from serving.decoder import Decoder, pick_dtype
from serving.engine import AHEAD, Engine
from serving.rows import SLACK, follow, leading, start_ranks
from serving.speed import kv_bytes_per_token
from storage import checkpoint_files
from text import chat
from weights.load import find, fingerprint_of, is_run, load_for_sampling, settings_of


@dataclass
class ServeSettings:
    """The address, the batch, limits."""

    host: str = "127.0.0.1"  # 0.0.0.0: all addresses of this machine
    port: Int[0, 65535] = 8000  # 0: any free one
    name: str = ""  # of the base in requests; empty = the last part of RUN
    adapters: str = ""  # folder of adapters that requests can name
    jobs: str = ""  # folder of finetuning jobs and uploads, whose models are served
    upload_mb: Int[1, 10**6] = 64  # of a file to finetune on
    runs: str = ""  # folder of run folders that the page shows
    max_lora_rank: Int[1, 2**16] = 16  # the highest rank of an adapter; sets the size of their bank
    keys: str = ""  # file of API keys, one a line; without it nobody needs one
    force: bool = False  # serve on a public address without keys
    chat_template: str = ""  # of messages: a tokenizer's folder or a file; empty = RUN's, or ChatML
    rows: Int[1, 10**6] = 32  # texts that are generated together; others wait
    max_tokens: Int[2, 10**15] = 2048  # of a text with its prompt; at most the learned positions
    prefix_mb: Int[0, 10**9] = 256  # for the beginnings of prompts, which several may share
    tp: Int[1, 2**16] = 1  # ranks over which each layer is cut: see tensor_parallel.py
    threads: Int[1, 10**4] = 1  # of PyTorch; more are slower if other programs run on a CPU
    max_requests: Int[1, 10**9] = 12800  # open at the same time; more get status 429
    max_seconds: Int[1, 10**9] = 600  # of a request
    drain_seconds: Int[0, 10**9] = 25  # after SIGTERM, for open requests; torchrun kills after 30
    step: int | None = None  # which checkpoint (none = the newest)
    tokenizer: str = ""  # of a Hugging Face folder (empty = its own; gpt2 if it names none)
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of the weights

    def check(self) -> None:
        """UserError if two settings exclude each other."""
        both = f"--jobs serves the models of its own folder: leave out --adapters={self.adapters}"
        require(not (self.jobs and self.adapters), both)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(argv) -> None:
    """Load the model, if any, then answer requests until SIGTERM or Ctrl-C."""
    given, cfg = config.load(argv, ServeSettings, takes="[RUN]")
    run = given[0] if given else ""
    for name in ("fastapi", "uvicorn", "llguidance"):
        require(importlib.util.find_spec(name), f"serve.py needs the package {name}: {EXTRA}")
    has_forms = not cfg.jobs or importlib.util.find_spec("python_multipart")
    require(has_forms, f"--jobs needs the package python-multipart: {EXTRA}")
    from web import app, guard
    from web.completions import Service
    from web.server import Server

    require_work(run, cfg)
    is_safe = is_loopback(cfg.host) or cfg.keys or cfg.force
    require(is_safe, f"--host={cfg.host} lets everybody in: give --keys=FILE, or --force")
    keys = guard.read_keys(cfg.keys) if cfg.keys else []
    if cfg.tp > 1 and program.rank() > 0:
        follow_rank_0(cfg, run)
        return
    n_files = program.raise_file_limit()  # each open request is an open file
    most_open = min(cfg.max_requests, n_files - guard.SPARE_FILES)
    require(most_open > 0, f"only {n_files} files may be open: raise it with ulimit -n")

    found = decoder_of(cfg, run) if run else None
    with leading(found and found[0]):
        service = service_of(cfg, run, most_open, *found) if run else Service(Catalog())
        hosts = ["127.0.0.1", "::1", "localhost", cfg.host] if is_loopback(cfg.host) else []
        folders = {"": cfg.runs} if cfg.runs else {}
        folders |= {"jobs": f"{cfg.jobs}/models"} if cfg.jobs else {}
        application = app.build(service, keys, hosts, most_open, folders)
        with listening(cfg.host, cfg.port) as waiting:
            ready = example(waiting, service.catalog.base, keys)
            server = Server(application, service, cfg.drain_seconds, ready)
            asyncio.run(server.serve([waiting]))
        if service.engine and service.engine.batch.lost:
            raise service.engine.batch.lost


def follow_rank_0(cfg: ServeSettings, run: str) -> None:
    """Compute this tensor rank's part of what rank 0 serves, until it ends."""
    for number in (signal.SIGTERM, signal.SIGINT):  # torchrun and terminals send these to all
        signal.signal(number, signal.SIG_IGN)
    decoder, _, _ = decoder_of(cfg, run)
    if cfg.adapters or cfg.jobs:
        bank_of(cfg, decoder)
    follow(decoder)


def decoder_of(cfg: ServeSettings, run: str):
    """The model, ready for inference, its tokenizer, and the path of its weights."""
    torch.set_num_threads(cfg.threads)
    model_cfg = settings_of(find(run))
    device, team = start_ranks(model_cfg, cfg.tp)
    dtype = pick_dtype(cfg.precision, device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        require_room(cfg, model_cfg, dtype.itemsize, free)
    model, tokenizer, path = load_for_sampling(
        run, cfg.step, device, cfg.tokenizer, team, in_fp32=dtype == torch.float32
    )
    return Decoder(model, tokenizer.vocab_size, dtype), tokenizer, path


def service_of(cfg: ServeSettings, run: str, most_texts: int, decoder: Decoder, tokenizer, path):
    """The model and its engine, as the endpoints take them (web/completions.py::Service)."""
    from web.completions import Service

    chat_template = cfg.chat_template or template_of(path)
    template = chat.load_template(chat_template, tokenizer.special_tokens)
    finetuning = finetuning_of(cfg, path, chat_template)
    catalog = catalog_of(cfg, decoder, run, path)
    max_tokens = longest_text(cfg, decoder.cfg)
    engine = Engine(decoder, cfg.rows, max_tokens, prefix_bytes=cfg.prefix_mb * 2**20)
    return Service(
        engine=engine,
        catalog=catalog,
        template=template,
        constraints=Constraints(tokenizer),
        tokenizer=tokenizer,
        most_texts=most_texts,
        most_seconds=cfg.max_seconds,
        finetuning=finetuning,
    )


def finetuning_of(cfg: ServeSettings, path: str, chat_template: str):
    """Where finetuning jobs are, and what they start from; None without --jobs.

    path: of the weights that are served. UserError if they are no base for adapters.
    """
    if not cfg.jobs:
        return None
    from web.files import Finetuning

    has_adapters = is_run(Path(path)) and checkpoint_files.read_adapter_settings(Path(path))
    fix = "serve its base, or merge it first: python -m weights.peft merge RUN OUT"
    require(not has_adapters, f"{path} has adapters, and jobs would add others: {fix}")
    finetuning = Finetuning(
        folder=Path(cfg.jobs).resolve(),
        base=os.path.abspath(path),
        chat_template=chat_template and os.path.abspath(chat_template),
        upload_bytes=cfg.upload_mb * 2**20,
        worker=shell("python", "-m", "web.worker", cfg.jobs),
    )
    finetuning.make_folders()
    return finetuning


def longest_text(cfg: ServeSettings, model: MPTConfig) -> int:
    """How many tokens a prompt and its continuation may have."""
    return min(cfg.max_tokens, model.max_seq_len if model.learned_positions else cfg.max_tokens)


def require_work(run: str, cfg: ServeSettings) -> None:
    """UserError if there is neither a model nor a folder of runs, or one of them is not there."""
    usage = "name a model, python serve.py RUN, or --runs=FOLDER"
    require(run or cfg.runs, f"there is nothing to serve: {usage}")
    is_folder = not cfg.runs or Path(cfg.runs).is_dir()
    require(is_folder, f"--runs={cfg.runs} is no folder: give one that holds run folders")
    need = "the model that they belong to: python serve.py RUN"
    require(run or not cfg.adapters, f"--adapters needs {need}")
    require(run or not cfg.jobs, f"--jobs needs {need}")
    require(run or cfg.tp == 1, f"--tp={cfg.tp} needs a model: python serve.py RUN")


def require_room(cfg: ServeSettings, model: MPTConfig, width: int, free: int) -> None:
    """UserError if weights, rows and beginnings of prompts take more than the free bytes.

    width: bytes of a number. free: of one tensor rank, which has its part of weights and rows.
    """
    weights = width * n_params(model) // cfg.tp
    row = (longest_text(cfg, model) + SLACK) * kv_bytes_per_token(model, width, cfg.tp)
    shared = cfg.prefix_mb * 2**20
    n_fit = (free - weights - shared) // row - 1  # one more for the prompt that is read
    gib = [f"{n_bytes / 2**30:.1f} GiB" for n_bytes in (weights, row, free)]
    problem = f"the weights take {gib[0]}, each row {gib[1]}, and the device has {gib[2]} free"
    smaller = "set --precision=bf16" if width > 2 else "it needs a larger device"
    fix = f"set --rows={n_fit} or a lower --max_tokens" if n_fit > 0 else smaller
    require(n_fit >= cfg.rows, f"{problem}: {fix}")


def catalog_of(cfg: ServeSettings, decoder: Decoder, run: str, path: str) -> Catalog:
    """The names that requests can have. With adapters, the decoder gets a bank for them."""
    name = cfg.name or Path(run).resolve().name
    folder = f"{cfg.jobs}/models" if cfg.jobs else cfg.adapters
    if not folder:
        return Catalog(name, None, read=None, check=None)
    fingerprint = fingerprint_of(Path(path))
    read = partial(read_adapter, base=name, base_fingerprint=fingerprint)
    catalog = Catalog(name, folder, read, check=lambda *found: decoder.bank.check(*found))
    bank_of(cfg, decoder).read = catalog.read
    threading.Thread(target=catalog.usable, daemon=True).start()  # reads all, before they are asked
    if (Path(folder) / name).exists():
        print(f"note: the adapter {name} has the base's name: set another --name", file=sys.stderr)
    return catalog


def bank_of(cfg: ServeSettings, decoder: Decoder) -> AdapterBank:
    """Room for the adapters of all texts that run or load."""
    layers = decoder.cfg.linear_layers()
    return AdapterBank(decoder, cfg.rows + AHEAD, cfg.max_lora_rank, layers)


def listening(host: str, port: int) -> socket.socket:
    """A socket that waits for clients. UserError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=4096)
    except OSError as error:
        problem = f"cannot listen on {host}, port {port}: {error.strerror}"
        raise UserError(f"{problem}: set another --port or --host") from error


def example(waiting: socket.socket, model: str, keys: list[str]) -> str:
    """A request that a user can type. model: its name, empty if there is none."""
    host, port = waiting.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    key = "-H 'Authorization: Bearer KEY' " if keys else ""
    address = f"http://{host}:{port}"
    page = f"or open {address} in a browser"
    if not model:
        return f"showing runs on {address}. Try:\ncurl {key}{address}/api/runs\n{page}"
    body = json.dumps({"model": model, "prompt": "def main(", "max_tokens": 32})
    return (
        f"serving {model} on {address}. Try:\n"
        f"curl {address}/v1/completions {key}-H 'Content-Type: application/json' "
        f"-d {shlex.quote(body)}\n{page}"
    )


def template_of(path: str) -> str:
    """Where a model's own chat template is; empty if it has none."""
    folder = Path(path)
    if (folder / "chat_template.jinja").exists():
        return path
    settings = folder / "tokenizer_config.json"
    has_one = settings.exists() and "chat_template" in json.loads(settings.read_text())
    return path if has_one else ""


if __name__ == "__main__":
    processes.run_alone_or_with_others(main)

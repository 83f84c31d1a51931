"""The page that people work with: web/static/, as it is, and what this server can do.

    GET /                 index.html
    GET /static/NAME      its styles and scripts
    GET /api/about        {"model": "demo" or null, "jobs": bool, "runs": bool, "chat": bool,
                          "worker": the command that starts one for the jobs}
    POST /api/plan        what plan.py answers; GET /api/plan/choices: what it can be asked for

The first two need no key, for they hold nothing of the user's: the page asks for the key and sends
it with each request. The files are read once, at start, so no request ever becomes a path. A
browser runs no script but these files, and loads nothing from another host (POLICY).
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

import devices
from planning import answer
from planning.fleet import MACHINES
from planning.search import MOST_DEVICES
from program import shell
from web.shapes import ApiError, Number, as_json

ROOT = Path(__file__).parent.parent
STATIC = ROOT / "web" / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # after an update, old scripts would meet new answers
}


def add_page(app: FastAPI, about: dict) -> None:
    """Add the page to an application. about: what /api/about answers."""
    files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in TYPES}

    def response_of(name: str) -> Response:
        kind = f"{TYPES[Path(name).suffix]}; charset=utf-8"
        return Response(files[name], media_type=kind, headers=HEADERS)

    @app.get("/", include_in_schema=False)
    async def index():
        return response_of("index.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str):
        if name not in files:
            raise ApiError(404, f"the page has no file {name[:100]}")
        return response_of(name)

    @app.get("/api/about")
    async def about_this_server():
        """Which of its parts this server has: a model, jobs, runs; whether it is made for chat."""
        return about


# --------------------------------------------------------------------------------------------------
# The planner

PLAN_SECONDS = 30  # for a search
MOST_PLANS = 8  # that wait for each other

Positive = Annotated[Number, Field(gt=0, le=1e18)]
Whole = Annotated[int, Field(ge=1, le=2**31)]
Name = Annotated[str, Field(pattern=r"^[\w .,/-]{1,100}$")]
Devices = Annotated[int, Field(ge=1, le=MOST_DEVICES)]


class PlanRequest(BaseModel):
    """The settings of a plan, by the names of plan.py's flags. What is left out, it chooses."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None  # the name of a config, such as mpt7b
    device: Name | None = None  # mi250x; several, as in h100,mi250, are compared
    machine: Name | None = None
    devices: Devices | None = None
    sweep_devices: Annotated[list[Devices], Field(min_length=1, max_length=16)] | None = None
    seq_len: Whole | None = None  # the flag is max_seq_len
    global_batch_size: Whole | None = None
    tokens: Positive | None = None
    budget: Positive | None = None  # days, for the best model
    network: Positive | None = None  # GB/s of a node
    price: Positive | None = None  # of a device for an hour
    tp: Whole | None = None
    pp: Whole | None = None
    sharding: Name | None = None
    microbatch_size: Whole | None = None
    activation_checkpointing: Name | None = None
    lora_rank: Whole | None = None
    choose: bool = False

    @property
    def words(self) -> list[str]:
        """The arguments of plan.py. ApiError if there is no such config."""
        words = []
        for name, value in self.model_dump(exclude_none=True).items():
            name = {"seq_len": "max_seq_len"}.get(name, name)
            if name == "model":
                words.append(config_of(value))
            elif name != "choose":
                values = value if isinstance(value, list) else [value]
                words.append(f"--{name}={','.join(map(str, values))}")
        return words + ["--choose"] * self.choose


def add_planner(app: FastAPI) -> None:
    """The endpoints of the planner's form."""
    turn = asyncio.Lock()  # searches take a whole processor: one at a time
    n_open = 0

    @app.get("/api/plan/choices")
    def choices():
        """The configs, devices and machines that a plan can name."""
        found = [row.name for row in devices.TABLE if not row.name.startswith("TPU")]
        return {"models": model_names(), "devices": found, "machines": list(MACHINES)}

    @app.post("/api/plan")
    async def plan(body: PlanRequest):
        """What plan.py answers: its rows, its text, and the command that gives the same."""
        nonlocal n_open
        words = await asyncio.to_thread(lambda: body.words)
        if n_open == MOST_PLANS:
            problem = f"{n_open} plans are being made"
            raise ApiError(429, f"{problem}: try again later", retry_after=PLAN_SECONDS)
        n_open += 1
        try:
            async with turn:
                found = await planned(words)
        finally:
            n_open -= 1
        return as_json({"command": f"python plan.py {shell(*words)}", **found})


def model_names() -> list[str]:
    """The names of the configs in this project's folder."""
    return sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def config_of(model: str) -> str:
    """The file of a config. ApiError unless it is in the project's folder."""
    if model not in model_names():
        raise ApiError(400, f"there is no config {model[:60]!r}: see /api/plan/choices", "model")
    return f"configs/{model}.py"


async def planned(words: list[str]) -> dict[str, Any]:
    """The rows and the text of a plan. ApiError with the line in which plan.py refuses.

    It runs as a process of its own: so it ends in time, and never holds up the engine.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *["plan.py", *words, "--json"],
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), PLAN_SECONDS)
    except asyncio.TimeoutError:
        fix = "set tp, pp and sharding, or fewer devices"
        raise ApiError(400, f"the search takes more than {PLAN_SECONDS} s: {fix}") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = errors.decode(errors="replace").splitlines() or ["the planner failed"]
    if process.returncode == 2:
        raise ApiError(400, lines[-1].removeprefix("error: "))
    if process.returncode:
        print(*lines, sep="\n", file=sys.stderr)
        raise ApiError(400, "the planner fails on these settings: the server's log says why")
    return as_answer(json.loads(out))


def as_answer(found: dict | list) -> dict[str, Any]:
    """The rows of plan.py's JSON, and the same as text."""
    if isinstance(found, list):  # of a sweep, of several devices, of a budget
        models = [row for row in found if row["label"] in BUDGET]
        lines = [line for row in models for line in answer.training_lines(row)]
        text = answer.text(found[0], below=lines) if lines else answer.text_of_rows(found)
        return {"rows": found, "would_fit": [], "text": text}
    others, fixes = found.pop("others"), found.pop("would_fit")
    text = answer.text(found, others, answer.labelled("would fit", fixes))
    return {"rows": [found, *others], "would_fit": fixes, "text": text}


BUDGET = ("budget", "or smaller")  # labels of plan.py's rows

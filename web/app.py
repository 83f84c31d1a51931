"""The application: which path is answered by what, and every error in OpenAI's shape.

    GET /                 index.html of web/static/, the page that people work with
    GET /static/NAME      its styles and scripts
    GET /api/about        {"model": "demo" or null, "jobs": bool, "runs": bool, "chat": bool,
                          "worker": the command that starts one for the jobs}

The first two need no key, for they hold nothing of the user's: the page asks for the key and sends
it with each request. The files are read once, at start, so no request ever becomes a path. A
browser runs no script but these files, and loads nothing from another host (POLICY).
"""

import re
import tempfile
import zipfile
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from program import UserError, require
from serving.catalog import Model
from text.chat import CHATML
from web import files, jobs, runs, shapes
from web.completions import Service, respond
from web.guard import MOST_BYTES, Guard, too_large
from web.shapes import ApiError, ChatRequest, CompletionRequest, LoadAdapter, UnloadAdapter
from weights import peft

STATIC = Path(__file__).parent / "static"
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


def build(
    service: Service,
    keys: list[str],
    hosts: list[str],
    most_open: int,
    folders: dict[str, str] | None = None,
) -> Guard:
    """The whole ASGI application. keys, hosts, most_open: see `Guard`.

    folders: of run folders, see `runs.add_runs`.
    """
    app = FastAPI(
        title="MPT",
        description="OpenAI's completions, from one model and its adapters.",
        docs_url=None,  # it would load scripts from another host: /openapi.json has all of it
        redoc_url=None,
        redirect_slashes=False,
        max_body_size=MOST_BYTES,
    )
    add_errors(app)
    upload_bytes = 0
    add_models(app, service)
    add_generation(app, service)
    if service.finetuning:
        files.add_files(app, service)
        jobs.add_jobs(app, service)
        upload_bytes = service.finetuning.upload_bytes
    if folders:
        runs.add_runs(app, folders)
    add_page(app, parts_of(service, folders))
    guard = Guard(app, keys, hosts, most_open, service.metrics, upload_bytes)

    @app.get("/health")
    async def health():
        """Whether new requests are accepted: 200, or 503 while the server shuts down."""
        status = "ok" if service.is_ready else "shutting down"
        values = {"status": status, **service.statistics()}
        return JSONResponse(values, 200 if service.is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics():
        """Counters in Prometheus's text format."""
        return service.metrics.text(service.statistics(), guard.n_open)

    return guard


def parts_of(service: Service, folders: dict | None) -> dict:
    """Which of its parts the page can use. chat: the model came with a chat template."""
    return {
        "model": service.catalog.base or None,
        "jobs": bool(service.finetuning),
        "worker": service.finetuning.worker if service.finetuning else None,
        "runs": bool(folders),
        "chat": bool(service.template and service.template.source != CHATML),
    }


def add_generation(app: FastAPI, service: Service) -> None:
    """The endpoints that generate text."""

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request):
        """Continue a prompt, or several."""
        return await respond(body, service, http)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, http: Request):
        """Answer a conversation."""
        return await respond(body, service, http)


def add_models(app: FastAPI, service: Service) -> None:
    """The endpoints about the base and its adapters. The last two are vLLM's."""
    catalog = service.catalog

    @app.get("/v1/models")
    def models():
        """The names that a request's `model` may have."""
        return {"object": "list", "data": [card_of(model, service) for model in catalog.usable()]}

    @app.get("/v1/models/{name:path}")
    def model(name: str):
        """One of these."""
        try:
            return card_of(catalog.find(name), service)
        except UserError as error:
            raise shapes.unknown_model(str(error)) from error

    @app.delete("/v1/models/{name:path}")
    def delete(name: str):
        """Delete the model of a job. Texts that have begun go on."""
        jobs.delete_model(service, name)
        return {"id": name, "object": "model", "deleted": True}

    @app.get("/api/adapters/{name:path}", response_class=StreamingResponse)
    def adapter(name: str):
        """An adapter as a zip file of a PEFT folder."""
        try:
            path = catalog.find(name).path
            require(path, f"{name[:100]!r} is the base, and no adapter")
            folder = re.sub(r"[^A-Za-z0-9._-]", "-", name)[-100:]
            with files.on_disk():
                file = zipped(path, folder, catalog.base)
        except UserError as error:
            raise shapes.unknown_model(str(error)) from error
        headers = {"Content-Disposition": f'attachment; filename="{folder}.zip"'}
        pieces = iter(partial(file.read, 2**16), b"")
        return StreamingResponse(pieces, headers=headers, media_type="application/zip")

    @app.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    def load(body: LoadAdapter):
        """Serve an adapter of the adapters' folder under a name, or load it again."""
        try:
            catalog.load(body.lora_name, body.lora_path)
        except UserError as error:
            raise ApiError(400, shapes.public(str(error)), param="lora_path") from error
        return f"{body.lora_name} is loaded"

    @app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    def unload(body: UnloadAdapter):
        """Serve an adapter no more. Texts that have begun go on."""
        try:
            catalog.unload(body.lora_name)
        except UserError as error:
            raise ApiError(400, str(error), param="lora_name") from error
        return f"{body.lora_name} is unloaded"


def zipped(path: str, folder: str, base: str):
    """A zip file with the adapter at a path as a PEFT folder, open at its beginning.

    base: the name of its base. UserError if it is no such adapter any more, OSError.
    """
    adapter = peft.adapter_at(path)
    adapter.base = base
    file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the answer)
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(file, "w") as archive:
        peft.write(Path(place, folder), adapter)
        for each in sorted(Path(place, folder).iterdir()):
            archive.write(each, f"{folder}/{each.name}")
    file.seek(0)
    return file


def card_of(model: Model, service: Service) -> dict:
    """A line of /v1/models. parent: vLLM's, the base that an adapter belongs to."""
    base = service.catalog.base
    card = {"id": model.name, "object": "model", "created": service.started, "owned_by": "mpt"}
    return {**card, "root": model.name, "parent": None if model.name == base else base}


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
# Errors


def add_errors(app: FastAPI) -> None:
    """Handlers that give all errors OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError):
        return error.response

    @app.exception_handler(RequestValidationError)
    async def misunderstood(request: Request, error: RequestValidationError):
        return refusal(error.errors()).response

    @app.exception_handler(StarletteHTTPException)
    async def not_routed(request: Request, error: HTTPException):
        reasons = {
            400: "the body is not JSON in UTF-8, or too deeply nested",
            404: f"there is no {request.url.path[:100]}: see /openapi.json",
            405: f"{request.url.path[:100]} does not take {request.method}",
        }
        if error.status_code == 413:
            return too_large(request.scope["state"]["most_bytes"]).response
        message = reasons.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message).response

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception):
        return ApiError(500, "the server failed: its log says why").response


def place_of(fault: dict) -> list[str]:
    """The field that a fault is about, from outside to inside, by pydantic.

    Of its place are left out the body or query and the types that a value might have had.
    """
    no_names = ("body", "query", "str", "int", "float")
    parts = [str(part) for part in fault["loc"]]
    return [part for part in parts if part not in no_names and not set("[-") & set(part)]


def refusal(faults: list[dict]) -> ApiError:
    """The answer to a body that is no request, from what pydantic found in its first field."""
    fault = faults[0]
    if fault["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {fault['ctx']['error']}")
    place = place_of(fault)
    if not place:
        wrong = "the body is not a JSON object: send the header Content-Type: application/json"
        return ApiError(400, wrong)
    given = fault.get("input")
    is_short = isinstance(given, int | float | str | None)
    shown = repr(given)[:60] if is_short else f"a {type(given).__name__}"
    reasons = [each["msg"] for each in faults if place_of(each) == place]  # of several types
    reason = " or ".join(reason.removeprefix("Value error, ") for reason in reasons)
    return ApiError(400, f"{'.'.join(place)}: {reason} (got {shown})", param=place[0])

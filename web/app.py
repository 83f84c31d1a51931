"""The application: which path is answered by what, and every error in OpenAI's shape."""

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from program import UserError
from serving.catalog import Model
from text.chat import CHATML
from web import files, jobs, page, runs, shapes
from web.completions import Service, respond
from web.guard import MOST_BYTES, Guard, too_large
from web.shapes import ApiError, ChatRequest, CompletionRequest, LoadAdapter, UnloadAdapter


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
    page.add_page(app, parts_of(service, folders))
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


def card_of(model: Model, service: Service) -> dict:
    """A line of /v1/models. parent: vLLM's, the base that an adapter belongs to."""
    base = service.catalog.base
    card = {"id": model.name, "object": "model", "created": service.started, "owned_by": "mpt"}
    return {**card, "root": model.name, "parent": None if model.name == base else base}


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

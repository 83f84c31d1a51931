"""The page that people work with: web/static/, as it is, and what this server can do.

    GET /                 index.html
    GET /static/NAME      its styles and scripts
    GET /api/about        {"model": "demo" or null, "jobs": bool, "runs": bool, "chat": bool,
                          "worker": the command that starts one for the jobs}

The first two need no key, for they hold nothing of the user's: the page asks for the key and sends
it with each request. The files are read once, at start, so no request ever becomes a path. A
browser runs no script but these files, and loads nothing from another host (POLICY).
"""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

from web.shapes import ApiError

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

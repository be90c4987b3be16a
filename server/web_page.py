"""The page at `/`: fixed files of this package, open to all; what it shows comes from routes that ask for the key.

Nothing is made at run time and nothing comes from elsewhere: the policy below lets the page load its own files and
speak to its own server, and nothing else. Read once at start; `--no-page` leaves it out.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request, Response

FOLDER = Path(__file__).with_name("page")

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked for again each time, answered with 304: a new server's page is never an old one's.
    "Cache-Control": "no-cache",
}


class Page:
    """The files by the path at which they are served."""

    def __init__(self, folder: Path = FOLDER) -> None:
        files = {f"/page/{path.name}": path for path in sorted(folder.iterdir()) if path.name != "index.html"}
        self._files = {path: _File(file) for path, file in ({"/": folder / "index.html"} | files).items()}

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(self._files)

    def router(self) -> APIRouter:
        router = APIRouter(include_in_schema=False)
        for path, file in self._files.items():
            router.add_api_route(path, file.answer, methods=["GET", "HEAD"])
        return router


class _File:
    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._type = _TYPES[path.suffix]
        self._etag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'

    async def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self._etag}
        if self._etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self._content, headers=headers, media_type=self._type)

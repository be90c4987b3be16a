"""A scripted completions server on a real socket: streams tokens, refuses, breaks off, as told. No engine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class FakeLLM:
    """Each request streams one frame a token, then the usage and [DONE], unless one of the scripts says otherwise."""

    url: str = ""
    refusals: list[int] = field(default_factory=list)
    """Statuses the next requests are refused with, one each."""
    refuse_always: int | None = None
    breaks: list[str] = field(default_factory=list)
    """How the next streams end after one token: "error" (an error frame) or "silent" (no [DONE])."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0

    async def complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        status = self.refusals.pop(0) if self.refusals else self.refuse_always
        if status is not None:
            body = {"error": {"message": "not now", "type": "overloaded", "param": None, "code": "queue_full"}}
            return JSONResponse(body, status, headers={"retry-after": "0.02"})
        return StreamingResponse(self._stream(self.bodies[-1], request.url.path), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], path: str) -> AsyncIterator[str]:
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            if "chat" in path:
                yield _frame({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            for number in range(body["max_tokens"]):
                if "chat" in path:
                    yield _frame({"choices": [{"index": 0, "delta": {"content": f"{number} "}}]})
                else:
                    yield _frame({"choices": [{"index": 0, "text": f"{number} ", "finish_reason": None}]})
                if self.breaks:
                    if self.breaks.pop(0) == "error":
                        yield _frame({"error": {"message": "the step failed", "type": "server_error"}})
                    return
            yield _frame({"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}]})
            usage = {"prompt_tokens": len(body.get("prompt", "12345")), "completion_tokens": body["max_tokens"]}
            yield _frame({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        finally:
            self.open_now -= 1

    def app(self) -> Starlette:
        async def models(request: Request) -> Response:
            return JSONResponse({"data": [{"id": "fake"}]})

        return Starlette(
            routes=[
                Route("/v1/models", models),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
            ]
        )


@contextmanager
def serving(fake: FakeLLM) -> Iterator[FakeLLM]:
    """Runs it in a thread on a free port until the block ends."""
    server = uvicorn.Server(uvicorn.Config(fake.app(), log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # The socket listens already: a client that comes before the loop runs waits in its backlog.
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield fake
        finally:
            server.should_exit = True
            thread.join()


def _frame(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"

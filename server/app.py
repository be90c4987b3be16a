"""The ASGI application: routes, guards, one shape for every error, and the engine's life inside the app's own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match

from engine.client import EngineClient
from engine.errors import CellserveError, ModelError, RequestRefused
from engine.types import EngineInfo
from server import chat, completions, embeddings, errors, kv_status, lag, live, models, probes, running, tokens
from server.admission import Admission, default_queued_tokens
from server.errors import ApiError
from server.guards import BodyLimit, Framing, KeyGuard, MediaType, OriginGuard, PhaseGuard, Trace
from server.key_limits import Accounts
from server.lifecycle import Lifecycle, Patience
from server.live import Live
from server.metrics import Metrics
from server.serving import Serving
from server.settings import Settings
from server.shares import Share
from server.siblings import Siblings, nobody
from server.text import Text
from server.tracing import Tracer
from server.web_page import Page

__all__ = ["Serving", "create_app"]

log = logging.getLogger("cellserve.server")

_PARTS = (completions, chat, embeddings, tokens, running, models, kv_status, live, probes)


def create_app(
    client: EngineClient,
    settings: Settings,
    *,
    share: Share | None = None,
    patience: Patience | None = None,
    ask_siblings: Callable[[str], Awaitable[tuple[str, ...]]] = nobody,
) -> FastAPI:
    """The whole server around an engine that was not started yet.

    Its lifespan starts the engine in the background and closes it at the end: /live and /ready answer at once, API
    routes when the engine is ready. Raises ConfigError when a key file cannot be read.

    share, patience, ask_siblings: of one of several API processes; what it admits with the others, its patience with
    the engine where that is not the options', and how it asks the others.

    app.state: `lifecycle`, `metrics`, `live` and `siblings` always, `serving` once the engine has been ready.
    """
    names = settings.names()
    tracer = Tracer(settings.otlp_endpoint, models.version()) if settings.otlp_endpoint else None
    page = Page() if settings.page else None
    page_paths = frozenset() if page is None else page.paths
    metrics = Metrics(names[0], client)

    async def on_ready(info: EngineInfo) -> None:
        # Off the event loop: a large tokenizer takes a second, and probes are answered meanwhile.
        try:
            text = await asyncio.to_thread(Text, info.tokenizer_dir)
        except Exception as error:  # tokenizers raises that very class
            raise ModelError(f"the tokenizer of {info.model} cannot be used: {error}") from error
        metrics.engine_ready(info)
        if settings.test_faults:
            app.state.faults.fit(text)
        log.info("defaults of a request: %s", models.told_defaults(info))
        places = info.max_num_seqs + info.max_waiting
        max_queued_tokens = settings.max_queued_tokens or default_queued_tokens(info.kv_cells, places)
        before: Serving | None = getattr(app.state, "serving", None)
        if before is not None:
            # Requests that were in the engine before this one hold slots and names, and some of them run again.
            before.text, before.fingerprint = text, models.fingerprint(info)
            before.admission.capacity, before.admission.max_queued_tokens = places, max_queued_tokens
            return
        admission = Admission(
            places,
            max_queued_tokens=max_queued_tokens,
            overload_status=settings.overload_status,
            on_refused=metrics.rejected,
            share=share,
        )
        accounts = Accounts(settings.key_limits())
        app.state.serving = Serving(
            client, settings, text, admission, names, metrics, models.fingerprint(info), accounts
        )

    lifecycle = Lifecycle(client, on_ready, patience or settings.patience())

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(lifecycle.run()), asyncio.create_task(lag.measure(metrics.loop_lagged))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await client.close(0)
            if tracer is not None:
                await tracer.close()

    app = FastAPI(
        title="cellserve",
        version=models.version(),
        # The pages load their scripts from a CDN; the document itself is served.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Said once for all routes; it also keeps the framework from announcing a 422 that is never sent.
        responses={"default": {"model": errors.ErrorAnswer, "description": "Whatever is not 2xx"}},
        lifespan=lifespan,
        middleware=[
            Middleware(Trace, metrics=metrics, has_access_log=settings.access_log, tracer=tracer),
            Middleware(Framing),
            Middleware(OriginGuard, allowed=settings.cors_origin, has_keys=bool(settings.keys()), host=settings.host),
            *_cors(settings),
            Middleware(KeyGuard, keys=settings.keys(), open_paths=page_paths),
            Middleware(PhaseGuard, refusal=lifecycle.refusal, metrics=metrics, open_paths=page_paths),
            Middleware(MediaType),
            Middleware(BodyLimit, max_bytes=settings.max_body_bytes),
        ],
        exception_handlers={
            ApiError: _api_error,
            CellserveError: _engine_error,
            RequestValidationError: _validation_error,
            HTTPException: _framework_error,
        },
    )
    app.state.lifecycle = lifecycle
    app.state.metrics = metrics
    app.state.live = Live(client)
    app.state.siblings = Siblings(metrics, lambda: _running_of(app), ask_siblings)
    for part in _PARTS:
        app.include_router(part.router)
    if settings.test_faults:
        from server import faults  # no code of it is in a server of users

        faults.mount(app, metrics)
    if page is not None:
        app.include_router(page.router())
    return app


def _running_of(app: FastAPI) -> running.Running | None:
    serving: Serving | None = getattr(app.state, "serving", None)
    return None if serving is None else serving.running


def _cors(settings: Settings) -> list[Middleware]:
    if not settings.cors_origin:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    ]


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _engine_error(request: Request, error: Exception) -> Response:
    """An engine's refusal that a handler let pass. Counted here: the engine's door is the last of the admission."""
    assert isinstance(error, CellserveError)
    serving: Serving = request.app.state.serving
    told = errors.from_engine(
        error, retry_after_s=serving.admission.retry_after_s(), overload_status=serving.settings.overload_status
    )
    if isinstance(error, RequestRefused):
        serving.metrics.rejected(told.code)
    return told.response()


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return errors.from_validation(error.errors(), error.body).response()


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = _methods_at(request)
    told = errors.from_status(error.status_code, method=request.method, path=request.scope["path"], headers=headers)
    return told.response()


def _methods_at(request: Request) -> str:
    """Of every route at the path; the framework names those of the first one alone."""
    routes = [*request.app.routes, *(route for part in _PARTS for route in part.router.routes)]
    there = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted(set().union(*(getattr(route, "methods", None) or () for route in there))))

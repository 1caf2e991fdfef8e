"""The FastAPI application: all routes, authentication, and errors in the format of the API that was called."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from .._core import AdaptrtError
from .._version import __version__
from . import (
    adapter_routes,
    api_schema,
    batch_routes,
    llama_routes,
    messages,
    metrics,
    ollama_create,
    ollama_routes,
    openai_routes,
    page_routes,
    prefix_cache_routes,
    responses,
    state_routes,
    triton_routes,
)
from .batches import Batches
from .errors import BAD_REQUEST, INTERNAL, NOT_FOUND, ApiError
from .http import CLIENT_CLOSED_REQUEST, UPLOAD_TYPE, data_frame, error_response, health_response, json_line
from .key_guard import KeyGuard
from .openai_answers import DONE
from .origin_guard import BINARY, OriginGuard, OriginPolicy
from .records import current_request
from .request_log import RequestRecorder
from .service import Service

OPEN_PATHS: Final = frozenset(
    {
        *("/", "/health", "/ping", "/version", "/metrics", "/v2/health/live", "/v2/health/ready"),
        *(api_schema.SCHEMA_PATH, api_schema.DOCS_PATH, ollama_routes.VERSION_PATH),
    }
)
"""Paths that need no key: health, pages, the schema, and metrics. Metrics show no more than names of adapters that are
in use or cached, which --max-named-adapters 0 hides.
"""


def make_app(service: Service, batches: Batches | None = None) -> FastAPI:
    """Makes the application. The service must be open. batches: None: there are no routes for files and batches."""
    app = FastAPI(title="AdaptRT", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    answer_errors(app)
    app.include_router(_about(service))
    app.include_router(openai_routes.routes(service))
    app.include_router(responses.routes(service))
    app.include_router(messages.routes(service))
    app.include_router(ollama_routes.routes(service))
    app.include_router(ollama_create.routes(service))
    app.include_router(llama_routes.routes(service))
    app.include_router(adapter_routes.routes(service))
    app.include_router(triton_routes.routes(service))
    app.include_router(metrics.routes(service.metrics.registry))
    app.include_router(state_routes.routes(service))
    app.include_router(prefix_cache_routes.routes(service))
    if batches is not None:
        app.include_router(batch_routes.routes(batches, service.options.limits, service.executor.work))
    app.include_router(page_routes.routes())
    if not service.options.disable_fastapi_docs:
        app.include_router(api_schema.routes(app))
    app.add_middleware(
        OriginGuard,
        policy=OriginPolicy(service.options.host, service.options.allowed_hosts),
        is_guarded=is_guarded,
        other_type=other_type,
        respond=respond,
    )
    if service.options.api_keys or service.options.admin_api_keys:
        app.add_middleware(
            KeyGuard,
            keys=service.options.api_keys,
            open_paths=OPEN_PATHS,
            respond=respond,
            admin_keys=service.options.admin_api_keys,
            is_admin_path=is_admin_path,
        )
    if service.options.allowed_origins:
        # Preflight requests have no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    # The middleware added last is the outermost one, so requests with refused keys are recorded as well.
    app.add_middleware(
        RequestRecorder, metrics=service.metrics, log_requests=service.options.log_requests, respond=respond
    )
    return app


def is_admin_path(path: str) -> bool:
    """True for paths that change what all clients use. They need an admin key if there are some."""
    paths = adapter_routes.ADAPTER_PATHS | {prefix_cache_routes.RESET_PATH, llama_routes.ADAPTERS_PATH}
    return path in paths or ollama_create.changes_models(path)


def is_guarded(path: str) -> bool:
    """True for paths that web pages of other sites may not use."""
    # Browsers send forms to other sites without asking, so uploads are guarded as well.
    return is_admin_path(path) or path == batch_routes.FILES_PATH


def other_type(path: str) -> str | None:
    """Returns the type of bodies that a path accepts in addition to JSON."""
    if path in (batch_routes.FILES_PATH, adapter_routes.UPLOAD_PATH):
        return UPLOAD_TYPE
    if path.startswith(ollama_create.BLOBS_PREFIX):
        return BINARY
    return triton_routes.other_type(path)


def respond(request: Request, error: ApiError) -> Response:
    """Makes the error response in the format of the API that was called. The request's record has the refused field."""
    record = current_request.get()
    if record is not None:
        record.refused_field = error.param
    if triton_routes.is_below_prefix(request.url.path):
        return triton_routes.error_response(error)
    if messages.is_messages_path(request.url.path):
        return messages.error_response(error)
    if ollama_routes.is_ollama_path(request.url.path):
        return ollama_routes.error_response(error)
    return error_response(error)


def last_frames(path: str, error: ApiError) -> bytes:
    """Returns the last events of a stream that fails, in the format of the API that was called."""
    if triton_routes.is_below_prefix(path):
        return data_frame({"error": str(error)})
    if messages.is_messages_path(path):
        return b"event: error\n" + data_frame(messages.error_body(error))
    if ollama_routes.is_ollama_path(path):
        return json_line(ollama_routes.error_body(error))
    return data_frame(error.body()) + DONE


def _about(service: Service) -> APIRouter:
    """Routes for load balancers and the version."""
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        return health_response(service.executor.executor.is_alive)

    @router.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    return router


def answer_errors(app: FastAPI) -> None:
    """Makes an application answer errors with respond()."""

    @app.exception_handler(ApiError)
    async def of_api(request: Request, error: ApiError) -> Response:
        return respond(request, error)

    @app.exception_handler(AdaptrtError)
    async def of_adaptrt(request: Request, error: AdaptrtError) -> Response:
        return respond(request, ApiError.of(error))

    @app.exception_handler(ClientDisconnect)
    async def of_disconnect(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def of_routing(request: Request, error: HTTPException) -> Response:
        status = HTTPStatus(error.status_code)
        kind = NOT_FOUND if status is HTTPStatus.NOT_FOUND else BAD_REQUEST
        said = f"{request.method} {request.url.path}: {error.detail}"
        return respond(request, ApiError(said, status=status, kind=kind, headers=error.headers))

    @app.exception_handler(Exception)
    async def of_defect(request: Request, error: Exception) -> Response:
        # Starlette raises the error again after this answer, so the server's log has it with its traceback.
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        said = "an internal error; the server's log has it"
        return respond(request, ApiError(said, status=status, kind=INTERNAL))

"""Routes that load and unload adapters while the server runs, with the paths and texts of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Awaitable
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..common.shown_value import shown
from .adapter_list import LIST_PATH, AdaptersQuery, adapter_list
from .errors import FORBIDDEN, INVALID_USER_INPUT, ApiError
from .http import read_json, read_query, unless_disconnected
from .service import Service
from .uploaded_adapters import UploadStore

LOAD_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_PATH: Final = "/v1/unload_lora_adapter"
SGLANG_LOAD_PATH: Final = "/load_lora_adapter"
SGLANG_UNLOAD_PATH: Final = "/unload_lora_adapter"
UPLOAD_PATH: Final = "/v1/upload_lora_adapter"
ADAPTER_PATHS: Final = frozenset({LOAD_PATH, UNLOAD_PATH, UPLOAD_PATH, SGLANG_LOAD_PATH, SGLANG_UNLOAD_PATH})
"""Paths of all routes that load or unload adapters."""


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class LoadLoraAdapter(_Fields):
    """Body of vLLM's POST /v1/load_lora_adapter."""

    lora_name: str = ""
    lora_path: str = ""
    base_model_name: str | None = None
    """One of the base model's names."""
    load_inplace: bool = False


class UnloadLoraAdapter(_Fields):
    """Body of vLLM's POST /v1/unload_lora_adapter."""

    lora_name: str = ""
    lora_int_id: int | None = None


class SglangLoad(_Fields):
    """Body of SGLang's POST /load_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]
    pinned: bool = False


class SglangUnload(_Fields):
    """Body of SGLang's POST /unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1)]


def routes(service: Service) -> APIRouter:
    """Makes the routes at ADAPTER_PATHS, and the list of adapters.

    The former answer 403 unless the server was started with --enable-lora-loading; uploads need --enable-lora-upload.
    """
    router = APIRouter()
    limits = service.options.limits
    uploads = UploadStore(limits)

    @router.get(LIST_PATH)
    async def listed(request: Request) -> Response:
        return JSONResponse(adapter_list(service, read_query(request, AdaptersQuery)))

    @router.post(UPLOAD_PATH)
    async def upload(request: Request) -> Response:
        _check_enabled(is_enabled=service.options.enable_lora_upload, flag="enable-lora-upload")
        sent = await uploads.read(request, service.executor.work)
        version = await service.adapters.load_sent(sent)
        return JSONResponse({"id": version, "object": "adapter", "name": sent.name})

    @router.post(LOAD_PATH)
    async def load(request: Request) -> Response:
        _check_enabled(is_enabled=service.options.enable_lora_loading)
        body = await read_json(request, LoadLoraAdapter, limits, service.executor.work)
        if not body.lora_name or not body.lora_path:
            raise ApiError("Both 'lora_name' and 'lora_path' must be provided.", kind=INVALID_USER_INPUT)
        if body.base_model_name is not None and body.base_model_name not in service.model_names:
            raise ApiError(
                f"base_model_name is {shown(body.base_model_name)}; expected {' or '.join(service.model_names)}",
                kind=INVALID_USER_INPUT,
                param="base_model_name",
            )
        resolve = service.adapters.resolve(body.lora_name, body.lora_path, replace=body.load_inplace)
        path = await unless_disconnected(request, resolve)
        await service.adapters.load(body.lora_name, path, replace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post(UNLOAD_PATH)
    async def unload(request: Request) -> Response:
        _check_enabled(is_enabled=service.options.enable_lora_loading or service.options.enable_lora_upload)
        body = await read_json(request, UnloadLoraAdapter, limits, service.executor.work)
        if not body.lora_name:
            raise ApiError("'lora_name' needs to be provided to unload a LoRA adapter.", kind=INVALID_USER_INPUT)
        await service.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @router.post(SGLANG_LOAD_PATH)
    async def sglang_load(request: Request) -> Response:
        _check_enabled(is_enabled=service.options.enable_lora_loading)
        body = await read_json(request, SglangLoad, limits, service.executor.work)

        async def resolve_and_load() -> None:
            resolve = service.adapters.resolve(body.lora_name, body.lora_path, replace=False)
            path = await unless_disconnected(request, resolve)
            await service.adapters.load(body.lora_name, path, pinned=body.pinned)

        return await _sglang_answer(service, resolve_and_load())

    @router.post(SGLANG_UNLOAD_PATH)
    async def sglang_unload(request: Request) -> Response:
        _check_enabled(is_enabled=service.options.enable_lora_loading or service.options.enable_lora_upload)
        body = await read_json(request, SglangUnload, limits, service.executor.work)
        return await _sglang_answer(service, service.adapters.unload(body.lora_name))

    return router


def _check_enabled(*, is_enabled: bool, flag: str = "enable-lora-loading") -> None:
    if not is_enabled:
        raise ApiError(
            f"adapters are not loaded or unloaded in this way: the server was started without --{flag}",
            status=HTTPStatus.FORBIDDEN,
            kind=FORBIDDEN,
        )


async def _sglang_answer(service: Service, change: Awaitable[None]) -> Response:
    """Awaits the change and answers with its result in SGLang's format."""
    status, outcome = HTTPStatus.OK, {}
    try:
        await change
    except ApiError as error:
        status, outcome = error.status, {"error_message": str(error)}
    content: dict[str, Any] = {
        "success": status is HTTPStatus.OK,
        "loaded_adapters": {adapter.name: str(adapter.path) for adapter in service.adapters.list()},
        **outcome,
    }
    return JSONResponse(content, status_code=int(status))

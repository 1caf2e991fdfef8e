"""OpenAI's routes for files and batches. They exist if the server was started with --batch-dir."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from .batch_store import FileInfo, page_of
from .batches import Batches
from .errors import TOO_LARGE, ApiError
from .http import limited_form, read_json, read_query
from .openai_fields import Fields, Metadata
from .options import ServerLimits
from .work import Work

FILES_PATH: Final = "/v1/files"
BATCHES_PATH: Final = "/v1/batches"
MAX_FIELD_BYTES: Final = 1 << 12
"""Maximum size of a field of an upload that is not the file."""
LONGEST_FILENAME: Final = 256
OVERHEAD_BYTES: Final = 1 << 16
"""Maximum size of an upload in addition to the file."""


class BatchRequest(Fields):
    """Body of POST /v1/batches."""

    input_file_id: str
    """A file of purpose "batch": one request per line, with custom_id, method, url and body."""
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    """The url of all requests."""
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class FilesQuery(BaseModel):
    """Selects the files that a list has."""

    model_config = ConfigDict(extra="forbid")

    purpose: Literal["batch", "batch_output"] | None = None
    limit: int = Field(10_000, ge=1, le=10_000)
    after: str | None = None
    order: Literal["desc"] = "desc"


class BatchesQuery(BaseModel):
    """Selects the batches that a list has."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(20, ge=1, le=100)
    after: str | None = None


def is_batch_path(path: str) -> bool:
    """True if routes() answer requests for a path."""
    return any(path == route or path.startswith(f"{route}/") for route in (FILES_PATH, BATCHES_PATH))


def routes(batches: Batches, limits: ServerLimits, work: Work) -> APIRouter:
    """Makes the routes. Threads of `work` parse long bodies."""
    router = APIRouter()
    store = batches.store

    @router.post(FILES_PATH)
    async def upload(request: Request) -> Response:
        info = await _upload(request, batches, limits.max_batch_file_bytes)
        return JSONResponse(info.content())

    @router.get(FILES_PATH)
    async def files(request: Request) -> Response:
        query = read_query(request, FilesQuery)
        page = page_of(
            store.files(), query.after, query.limit, keeps=lambda info: query.purpose in (None, info.purpose)
        )
        return JSONResponse(page)

    @router.get(f"{FILES_PATH}/{{file_id}}")
    async def file(file_id: str) -> Response:
        return JSONResponse(store.file(file_id).content())

    @router.get(f"{FILES_PATH}/{{file_id}}/content")
    async def content(file_id: str) -> Response:
        return FileResponse(store.path(file_id), media_type="application/octet-stream")

    @router.delete(f"{FILES_PATH}/{{file_id}}")
    async def delete(file_id: str) -> Response:
        await asyncio.to_thread(store.delete_file, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    @router.post(BATCHES_PATH)
    async def create(request: Request) -> Response:
        fields = await read_json(request, BatchRequest, limits, work)
        purpose = store.file(fields.input_file_id).purpose
        if purpose != "batch":
            raise ApiError(
                f"input_file_id names a file of purpose '{purpose}'; expected 'batch'", param="input_file_id"
            )
        batch = await batches.create(fields.endpoint, fields.input_file_id, fields.metadata)
        return JSONResponse(batch.content())

    @router.get(BATCHES_PATH)
    async def listed(request: Request) -> Response:
        query = read_query(request, BatchesQuery)
        return JSONResponse(page_of(store.batches(), query.after, query.limit))

    @router.get(f"{BATCHES_PATH}/{{batch_id}}")
    async def batch(batch_id: str) -> Response:
        return JSONResponse(store.batch(batch_id).content())

    @router.post(f"{BATCHES_PATH}/{{batch_id}}/cancel")
    async def cancel(batch_id: str) -> Response:
        return JSONResponse((await batches.cancel(batch_id)).content())

    @router.delete(f"{BATCHES_PATH}/{{batch_id}}")
    async def forget(batch_id: str) -> Response:
        await asyncio.to_thread(store.delete_batch, batch_id)
        return JSONResponse({"id": batch_id, "object": "batch", "deleted": True})

    return router


async def _upload(request: Request, batches: Batches, max_bytes: int) -> FileInfo:
    """Reads and stores the file of a form. Raises ApiError for a form that has anything else, or that is too large."""
    form_of = limited_form(request, max_bytes + OVERHEAD_BYTES, "file and purpose", lambda: _too_large(max_bytes))
    async with form_of(max_files=1, max_fields=8, max_part_size=MAX_FIELD_BYTES) as form:
        unknown = [name for name in form if name not in ("file", "purpose")]
        if unknown:
            raise ApiError(f"{unknown[0][:64]}: is not known here", param=unknown[0][:64])
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise ApiError("file: is missing; expected a file of requests, one per line", param="file")
        if purpose != "batch":
            raise ApiError(f"purpose is {_shown(purpose)}; expected 'batch'", param="purpose")
        if file.size is None or file.size > max_bytes:
            raise _too_large(max_bytes)
        name = (file.filename or "")[:LONGEST_FILENAME]
        return await asyncio.to_thread(batches.store.add_file, name, "batch", file.file, file.size)


def _shown(value: Any) -> str:
    return f"'{value[:64]}'" if isinstance(value, str) else "missing"


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        f"the file has more than {max_bytes} bytes (the server's --max-batch-file-bytes)",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        kind=TOO_LARGE,
        param="file",
    )

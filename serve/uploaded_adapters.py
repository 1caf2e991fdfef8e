"""POST /v1/upload_lora_adapter: adapters that clients send as files, without a shared disk."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, Final

from starlette.datastructures import UploadFile
from starlette.requests import Request

from ..formats.adapter.adapter_copy import SENT_FILES
from ..formats.adapter.recognise import CONFIG_FILE, MAX_CONFIG_BYTES, SAFETENSORS_FILE
from ..formats.sources import Source
from ..runtime.memory_adapters import MemoryAdapters
from .errors import TOO_LARGE, ApiError
from .http import limited_form
from .options import ServerLimits
from .work import Work, WorkKind

OVERHEAD_BYTES: Final = 1 << 16
"""Maximum size of an upload in addition to its files."""
_FIELDS: Final = ("lora_name", "load_inplace", "pinned")
_BOOLEANS: Final = {"true": True, "false": False}


@dataclass(frozen=True)
class Upload:
    """An adapter that a client has sent."""

    name: str
    source: Source
    """The stored files. They are deleted when no request can ask for the adapter any more."""
    load_inplace: bool
    pinned: bool


class UploadStore:
    """Directories of sent adapters, in memory where the system has a place for it."""

    def __init__(self, limits: ServerLimits) -> None:
        """Creates no directory yet."""
        self._limits = limits
        self._memory = MemoryAdapters()
        self._sizes: dict[Path, int] = {}
        self._lock = threading.Lock()

    async def read(self, request: Request, work: Work) -> Upload:
        """Reads a form with an adapter. Raises ApiError for one that has anything else, or that is too large."""
        max_bytes = self._limits.max_adapter_upload_bytes
        parts = f"lora_name, {CONFIG_FILE} and {SAFETENSORS_FILE}"
        form_of = limited_form(request, max_bytes + OVERHEAD_BYTES, parts, lambda: _too_large(max_bytes))
        most = len(SENT_FILES) + len(_FIELDS)
        async with form_of(max_files=most, max_fields=most, max_part_size=MAX_CONFIG_BYTES) as form:
            items = form.multi_items()
            given = [name for name, _ in items]
            for name in given:
                if name not in (*_FIELDS, *SENT_FILES):
                    accepted = ", ".join((*_FIELDS, *SENT_FILES))
                    raise ApiError(f"{name[:64]}: is not known here; accepted: {accepted}", param=name[:64])
                if given.count(name) > 1:
                    raise ApiError(f"{name}: is given {given.count(name)} times; expected once", param=name)
            values = dict(items)
            files: dict[str, IO[bytes] | bytes] = {
                name: _file_of(name, values[name]) for name in SENT_FILES if name in values
            }
            for name in (CONFIG_FILE, SAFETENSORS_FILE):
                if name not in files:
                    raise ApiError(f"{name}: is missing; expected the adapter's file", param=name)
            lora_name = values.get("lora_name")
            if not isinstance(lora_name, str) or not lora_name:
                raise ApiError("lora_name: is missing; expected the adapter's name", param="lora_name")
            inplace, pinned = (_flag(name, values.get(name, "false")) for name in ("load_inplace", "pinned"))
            source = await work.run(WorkKind.FILES, self.store, files)
        return Upload(lora_name, source, inplace, pinned)

    def store(self, files: Mapping[str, IO[bytes] | bytes]) -> Source:
        """Writes an adapter's files to a new directory. Raises ApiError if they are too large together with others."""
        size = sum(_size(file) for file in files.values())
        if size > self._limits.max_adapter_upload_bytes:
            raise _too_large(self._limits.max_adapter_upload_bytes)
        with self._lock:
            self._sizes = {path: num_bytes for path, num_bytes in self._sizes.items() if path.exists()}
            used = sum(self._sizes.values())
            if used + size > self._limits.max_uploaded_bytes:
                raise ApiError(
                    f"the adapter has {size} bytes, and the adapters that clients have sent have {used}; expected at "
                    f"most {self._limits.max_uploaded_bytes} together (the server's --max-uploaded-bytes)",
                    status=HTTPStatus.INSUFFICIENT_STORAGE,
                )
            directory = self._memory.new_directory()
            self._sizes[directory] = size
        try:
            return self._memory.source_of_files(directory, files, "upload")
        except OSError as error:
            raise ApiError(
                f"the adapter cannot be stored: {error.strerror}", status=HTTPStatus.INSUFFICIENT_STORAGE
            ) from error


def upload_limits(limits: ServerLimits) -> ServerLimits:
    """Returns limits with which the body of an upload may be read as a whole."""
    return replace(limits, max_body_bytes=limits.max_adapter_upload_bytes + OVERHEAD_BYTES)


def _file_of(name: str, part: UploadFile | str) -> IO[bytes] | bytes:
    if isinstance(part, UploadFile):
        return part.file
    if name == SAFETENSORS_FILE:
        raise ApiError(f"{name}: is a text; expected a file", param=name)
    return part.encode()


def _size(file: IO[bytes] | bytes) -> int:
    if isinstance(file, bytes):
        return len(file)
    size = file.seek(0, 2)
    file.seek(0)
    return size


def _flag(name: str, value: Any) -> bool:
    if value not in _BOOLEANS:
        shown = value[:64] if isinstance(value, str) else "a file"
        raise ApiError(f"{name} is '{shown}'; expected true or false", param=name)
    return _BOOLEANS[value]


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        f"the adapter has more than {max_bytes} bytes (the server's --max-adapter-upload-bytes)",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        kind=TOO_LARGE,
    )

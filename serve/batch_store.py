"""Files and batches of clients on disk, below the directory of --batch-dir.

files/ID is a file's content and files/ID.json its description; batches/ID.json is a batch, and batches/ID.output and
batches/ID.errors are its results until it ends. A description is written last and replaced as a whole, so that a server
that is killed leaves nothing half there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from .._core import ConfigError
from ..common.file_lock import file_lock_if_free
from .errors import ApiError
from .options import ServerLimits

BATCH_SECONDS: Final = 24 * 3600
"""Time that a batch may take, as in OpenAI's API."""
RESULT_KINDS: Final = ("output", "errors")
"""Kinds of a batch's results: answers, and lines that were refused."""
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
"""Statuses of batches that change no more."""
_ID: Final = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
_LOCK: Final = "lock"
Stored = TypeVar("Stored", bound="FileInfo | Batch")


@dataclass(frozen=True)
class FileInfo:
    """A client's file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def content(self) -> dict[str, Any]:
        """Returns the file in OpenAI's format."""
        return {**asdict(self), "object": "file", "status": "processed"}


@dataclass
class Batch:
    """A batch. Times are in seconds since the epoch; None: not yet."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    outcome: str = ""
    """Status after the results are stored; empty: lines are still running."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: dict[str, int] = field(default_factory=dict)
    """Time of each further status, by its name."""
    total: int = 0
    completed: int = 0
    failed: int = 0

    def enter(self, status: str) -> None:
        """Changes the status and notes the time."""
        self.status = status
        self.times[status] = int(time.time())

    def content(self) -> dict[str, Any]:
        """Returns the batch in OpenAI's format."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        has_ended = self.status in ENDED
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id if has_ended else None,
            "error_file_id": self.error_file_id if has_ended else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in names},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class BatchStore:
    """Files and batches on disk. Its methods block, and any thread may call them."""

    def __init__(self, directory: Path, limits: ServerLimits) -> None:
        """Reads what an earlier server stored. Raises ConfigError if the directory cannot be used, or is in use."""
        self._files_dir, self._batches_dir = directory / "files", directory / "batches"
        self._limits = limits
        self._changing = threading.Lock()
        self._held = contextlib.ExitStack()
        try:
            for path in (self._files_dir, self._batches_dir):
                path.mkdir(parents=True, exist_ok=True)
            if not self._held.enter_context(file_lock_if_free(directory / _LOCK)):
                raise ConfigError(
                    f"batch_dir is {directory}, which another server uses; expected a directory of its own"
                )
            self._files = self._read(self._files_dir, FileInfo)
            self._batches = self._read(self._batches_dir, Batch)
            self._remove_leftovers()
            self._num_bytes = sum(path.stat().st_size for path in self._content_paths())
        except ConfigError:
            self._held.close()
            raise
        except (OSError, ValueError, TypeError) as error:
            self._held.close()
            raise ConfigError(f"batch_dir is {directory}, which cannot be used: {error}") from error

    def close(self) -> None:
        """Lets another server use the directory."""
        self._held.close()

    def files(self) -> list[FileInfo]:
        """Returns all files, the oldest first."""
        return list(self._files.values())

    def batches(self) -> list[Batch]:
        """Returns all batches, the oldest first."""
        return list(self._batches.values())

    def file(self, file_id: str) -> FileInfo:
        """Returns a file. Raises ApiError for an unknown id."""
        found = self._files.get(file_id)
        if found is None:
            raise ApiError.not_found(f"The file '{file_id[:64]}' does not exist.", param="file_id")
        return found

    def batch(self, batch_id: str) -> Batch:
        """Returns a batch. Raises ApiError for an unknown id."""
        found = self._batches.get(batch_id)
        if found is None:
            raise ApiError.not_found(f"The batch '{batch_id[:64]}' does not exist.", param="batch_id")
        return found

    def path(self, file_id: str) -> Path:
        """Returns the path of a file's content. Raises ApiError for an unknown id."""
        return self._files_dir / self.file(file_id).id

    def add_file(self, filename: str, purpose: str, source: BinaryIO, num_bytes: int) -> FileInfo:
        """Stores a copy of an open file. Raises ApiError for a file that exceeds the quotas."""
        with self._changing:
            if len(self._files) >= self._limits.max_batch_files:
                raise _full(f"{self._limits.max_batch_files} files are stored (the server's --max-batch-files)")
            self._reserve(num_bytes)
            info = FileInfo(_new_id("file-"), num_bytes, int(time.time()), filename, purpose)
        path = self._files_dir / info.id
        try:
            with path.open("xb") as copy:
                shutil.copyfileobj(source, copy)
            self._describe(self._files_dir, info)
        except BaseException:
            path.unlink(missing_ok=True)
            self._free(num_bytes)
            raise
        with self._changing:
            self._files[info.id] = info
        return info

    def delete_file(self, file_id: str) -> None:
        """Deletes a file. Raises ApiError for an unknown id, and for the input of a batch that runs."""
        with self._changing:
            info = self.file(file_id)
            for batch in self._batches.values():
                if batch.input_file_id == file_id and batch.status not in ENDED:
                    raise ApiError(
                        f"the file '{file_id}' is the input of '{batch.id}', which is {batch.status}; expected a "
                        "batch that has ended",
                        status=HTTPStatus.CONFLICT,
                        param="file_id",
                    )
            (self._files_dir / f"{info.id}.json").unlink()
            (self._files_dir / info.id).unlink()
            del self._files[file_id]
            self._num_bytes -= info.bytes

    def add_batch(self, endpoint: str, input_file_id: str, metadata: dict[str, str] | None) -> Batch:
        """Stores a new batch. Raises ApiError for an unknown file, and if too many batches are stored."""
        with self._changing:
            self.file(input_file_id)
            if len(self._batches) >= self._limits.max_batches:
                raise _full(f"{self._limits.max_batches} batches are stored (the server's --max-batches)")
            now = int(time.time())
            batch = Batch(_new_id("batch_"), endpoint, input_file_id, now, now + BATCH_SECONDS, metadata)
            self._describe(self._batches_dir, batch)
            self._batches[batch.id] = batch
            return batch

    def save(self, batch: Batch) -> None:
        """Writes a batch after a change."""
        with self._changing:
            self._describe(self._batches_dir, batch)

    def delete_batch(self, batch_id: str) -> None:
        """Deletes a batch that has ended; its files stay. Raises ApiError for an unknown id and for one that runs."""
        with self._changing:
            batch = self.batch(batch_id)
            if batch.status not in ENDED:
                raise ApiError(
                    f"the batch '{batch_id}' is {batch.status}; expected one that has ended, or POST "
                    f"/v1/batches/{batch_id}/cancel",
                    status=HTTPStatus.CONFLICT,
                    param="batch_id",
                )
            (self._batches_dir / f"{batch.id}.json").unlink()
            del self._batches[batch_id]

    def append(self, batch: Batch, kind: str, line: bytes) -> None:
        """Adds a line to a batch's results. Raises ApiError if the quota of bytes is used up."""
        with self._changing:
            self._reserve(len(line))
        with self._results(batch, kind).open("ab") as file:
            file.write(line)

    def results(self, batch: Batch, kind: str) -> Iterator[bytes]:
        """Yields the lines of a batch's results so far. Removes an incomplete last line, which a killed server left."""
        path = self._results(batch, kind)
        if not path.exists():
            return
        complete = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                complete += len(line)
                yield line
        if (rest := path.stat().st_size - complete) > 0:
            os.truncate(path, complete)
            self._free(rest)

    def end(self, batch: Batch, outcome: str) -> None:
        """Makes files of a batch's results and ends it as `outcome`. Does the rest if a server was killed meanwhile."""
        if not batch.outcome:
            batch.outcome = outcome
            has = {kind: self._results(batch, kind).exists() for kind in RESULT_KINDS}
            batch.output_file_id = _new_id("file-") if has["output"] else None
            batch.error_file_id = _new_id("file-") if has["errors"] else None
            self.save(batch)
        for kind, file_id in zip(RESULT_KINDS, (batch.output_file_id, batch.error_file_id), strict=True):
            if file_id is None or file_id in self._files:
                continue
            results, path = self._results(batch, kind), self._files_dir / file_id
            if results.exists():
                results.replace(path)
            info = FileInfo(file_id, path.stat().st_size, int(time.time()), f"{batch.id}_{kind}.jsonl", "batch_output")
            self._describe(self._files_dir, info)
            with self._changing:
                self._files[file_id] = info
        batch.enter(batch.outcome)
        self.save(batch)

    def _results(self, batch: Batch, kind: str) -> Path:
        return self._batches_dir / f"{batch.id}.{kind}"

    def _reserve(self, num_bytes: int) -> None:
        most = self._limits.max_batch_bytes
        if self._num_bytes + num_bytes > most:
            raise _full(
                f"with {num_bytes} bytes more, the files have more than {most} (the server's --max-batch-bytes)"
            )
        self._num_bytes += num_bytes

    def _free(self, num_bytes: int) -> None:
        with self._changing:
            self._num_bytes -= num_bytes

    def _describe(self, directory: Path, stored: FileInfo | Batch) -> None:
        path = directory / f"{stored.id}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(stored)), encoding="utf-8")
        new.replace(path)

    def _read(self, directory: Path, kind: type[Stored]) -> dict[str, Stored]:
        found = [kind(**json.loads(path.read_text(encoding="utf-8"))) for path in directory.glob("*.json")]
        for one in found:
            if not _ID.fullmatch(one.id):
                raise ValueError(f"{directory} has an entry with id {one.id[:64]!r}; expected files of a server only")
        return {one.id: one for one in sorted(found, key=lambda one: one.id)}

    def _remove_leftovers(self) -> None:
        """Removes files that a killed server did not describe, and keeps results of batches that have not ended."""
        promised = {
            file_id for batch in self._batches.values() for file_id in (batch.output_file_id, batch.error_file_id)
        }
        for path in self._files_dir.iterdir():
            if path.suffix == ".new" or (path.suffix == "" and path.name not in {*self._files, *promised}):
                path.unlink()
        for path in self._batches_dir.iterdir():
            if path.suffix == ".new" or (path.suffix != ".json" and path.stem not in self._batches):
                path.unlink()
        for file_id in [file_id for file_id in self._files if not (self._files_dir / file_id).is_file()]:
            (self._files_dir / f"{file_id}.json").unlink()
            del self._files[file_id]

    def _content_paths(self) -> Iterator[Path]:
        for directory in (self._files_dir, self._batches_dir):
            yield from (path for path in directory.iterdir() if path.suffix != ".json")


def page_of(
    stored: list[Stored], after: str | None, limit: int, *, keeps: Callable[[Stored], bool] = lambda _: True
) -> dict[str, Any]:
    """Returns a page of a list in OpenAI's format, the newest first.

    after: id of the last entry of the page before. Raises ApiError for an unknown one.
    """
    newest = [one for one in reversed(stored) if keeps(one)]
    ids = [one.id for one in newest]
    if after is not None and after not in ids:
        raise ApiError(f"after is '{after[:64]}'; expected the id of an entry in the list", param="after")
    first = 0 if after is None else ids.index(after) + 1
    data = [one.content() for one in newest[first : first + limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": first + limit < len(newest),
    }


def _new_id(prefix: str) -> str:
    """Makes an id that cannot be guessed. Ids sort in the order in which they were made."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def _full(reason: str) -> ApiError:
    return ApiError(
        f"{reason}; expected fewer: delete some with DELETE /v1/files/ID or /v1/batches/ID",
        status=HTTPStatus.INSUFFICIENT_STORAGE,
        param="file",
    )

"""Models that clients create over the served ones, and the files of their adapters, below one directory."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, Final

from pydantic import ValidationError

from .._core import AdaptrtError, ConfigError
from ..common.json_fields import load_json_object
from ..formats.sources import Source, find_adapter
from .adapters import ServedAdapters
from .errors import BAD_REQUEST, TOO_LARGE, ApiError
from .go_template import GoTemplate, translate
from .ollama_options import OllamaOptions
from .options import ServerLimits
from .work import Work, WorkKind

_DIGEST: Final = re.compile(r"sha256[:-]([0-9a-f]{64})")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,127}")
_GGUF: Final = ".gguf"
_PART: Final = ".part"
MAX_MODELS: Final = 1000
_WRITTEN_BYTES: Final = 1 << 20
"""Bytes that are written at once, in a thread."""


@dataclass(frozen=True)
class CreatedModel:
    """A name for the base model or an adapter, with its own prompt and parameters."""

    name: str
    created: int
    """Time of its creation, in seconds since the epoch."""
    parent: str | None = None
    """Name of the served adapter that it stands for; None: the base model, or its own adapter."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of its own adapter: digests by name; {}: it has none."""
    system: str = ""
    template: str = ""
    """A Go template; empty: the adapter's or the model's own template."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Fields of OllamaOptions."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Messages before those of a request, with the fields of OllamaMessage."""
    license: tuple[str, ...] = ()
    go_template: GoTemplate | None = field(default=None, compare=False)
    """The translation of `template`."""

    @property
    def adapter(self) -> str | None:
        """Name of the adapter that answers; None: the base model."""
        return self.name if self.files else self.parent

    def content(self) -> dict[str, Any]:
        """Returns the content of its file."""
        return {
            "name": self.name,
            "created": self.created,
            "parent": self.parent,
            "files": dict(self.files),
            "system": self.system,
            "template": self.template,
            "parameters": dict(self.parameters),
            "messages": [dict(message) for message in self.messages],
            "license": list(self.license),
        }

    @classmethod
    def load(cls, path: Path) -> CreatedModel:
        """Reads a file. Raises ConfigError that names it."""
        content = load_json_object(path, ConfigError)
        try:
            model = cls(
                **{**content, "messages": tuple(content["messages"]), "license": tuple(content["license"])},
                go_template=translate(content["template"]) if content["template"] else None,
            )
            OllamaOptions.model_validate(dict(model.parameters))
        except (KeyError, TypeError, ValidationError, ConfigError) as error:
            raise ConfigError(f"{path}: is not a model that this server created: {error}") from error
        return model


def digest_of(text: str) -> str:
    """Returns the hexadecimal digits of a digest such as sha256:0a1b... Raises ApiError."""
    found = _DIGEST.fullmatch(text)
    if found is None:
        raise ApiError(f"the digest is '{text[:80]}'; expected sha256: and 64 hexadecimal digits", param="digest")
    return found[1]


def check_files(files: Mapping[str, str]) -> None:
    """Raises ApiError for names of files that a directory must not have, and for digests that are none."""
    for name, digest in files.items():
        if _FILE_NAME.fullmatch(name) is None:
            raise ApiError(
                f"adapters has the file '{name[:80]}'; expected a name without folders, such as adapter_config.json",
                param="adapters",
            )
        digest_of(digest)


class CreatedModels:
    """The created models of a server. Call all methods on the event loop."""

    def __init__(self, directory: Path, limits: ServerLimits, work: Work, adapters: ServedAdapters) -> None:
        """directory: an existing directory, which only this server uses."""
        self._blobs: Final = directory / "blobs"
        self._adapter_files: Final = directory / "adapters"
        self._files: Final = directory / "models"
        self._limits = limits
        self._work = work
        self._adapters = adapters
        self._models: dict[str, CreatedModel] = {}
        self._num_bytes = 0
        """Bytes of all blobs, with those that are arriving."""
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Loads the models that the directory has. Raises ConfigError."""
        for model in await self._work.run(WorkKind.FILES, self._load_all):
            try:
                await self._add_adapter(model, replace=False)
            except ApiError as error:
                raise ConfigError(f"{self._file_of(model.name)}: {error}") from error
            self._models[model.name] = model

    def list(self) -> list[CreatedModel]:
        """Returns all models by name."""
        return sorted(self._models.values(), key=lambda model: model.name)

    def find(self, name: str) -> CreatedModel | None:
        """Returns the model of a name; None: there is none."""
        return self._models.get(name)

    async def has_blob(self, digest: str) -> bool:
        """True if the file of this digest was stored. Raises ApiError for anything but a digest."""
        return await self._work.run(WorkKind.FILES, (self._blobs / digest_of(digest)).is_file)

    async def store_blob(self, digest: str, pieces: AsyncIterator[bytes]) -> None:
        """Stores a file as it arrives. Raises ApiError if it is too large, and for another digest than that of it."""
        path = self._blobs / digest_of(digest)
        part, name = await self._work.run(WorkKind.FILES, self._open_part)
        hashed = hashlib.sha256()
        size = 0
        try:
            with part:
                waiting = bytearray()
                async for piece in pieces:
                    size += len(piece)
                    self._num_bytes += len(piece)
                    self._check_size(size)
                    waiting += piece
                    if len(waiting) >= _WRITTEN_BYTES:
                        await self._work.run(WorkKind.FILES, _write, part, hashed, bytes(waiting))
                        waiting.clear()
                await self._work.run(WorkKind.FILES, _write, part, hashed, bytes(waiting))
            if hashed.hexdigest() != path.name:
                raise ApiError(
                    f"the file's digest is sha256:{hashed.hexdigest()}; expected that of the address, {digest}",
                    param="digest",
                )
            if path.is_file():
                self._num_bytes -= size
            name.replace(path)
        except BaseException:
            self._num_bytes -= size
            name.unlink(missing_ok=True)
            raise

    async def create(self, model: CreatedModel) -> None:
        """Adds a model, or replaces the created model of its name. Raises ApiError; then nothing has changed."""
        async with self._lock:
            old = self._models.get(model.name)
            if old is None and len(self._models) >= MAX_MODELS:
                raise _full(f"there are {MAX_MODELS} created models; delete some of them")
            await self._add_adapter(model, replace=old is not None and bool(old.files))
            await self._work.run(WorkKind.FILES, self._write, model)
            self._models[model.name] = model
            if old is not None and old.files and not model.files:
                await self._adapters.unload(model.name)
            if old is not None:
                await self._work.run(WorkKind.FILES, self._delete_unused, old, self.list())

    async def delete(self, name: str) -> None:
        """Removes a model, and the files that no other model uses. Raises ApiError for an unknown name."""
        async with self._lock:
            model = self._models.get(name)
            if model is None:
                raise ApiError.not_found(f"The model '{name}' was not created here.", param="model")
            if model.files:
                await self._adapters.unload(name)
            del self._models[name]
            await self._work.run(WorkKind.FILES, self._file_of(name).unlink)
            await self._work.run(WorkKind.FILES, self._delete_unused, model, self.list())

    def has_template(self, text: str) -> bool:
        """True for the Jinja of a model's template."""
        return any(model.go_template is not None and model.go_template.jinja == text for model in self._models.values())

    async def _add_adapter(self, model: CreatedModel, *, replace: bool) -> None:
        """Adds a model's own adapter, if it has one. Raises ApiError."""
        if model.files:
            try:
                source = await self._work.run(WorkKind.FILES, self._adapter_source, model.files)
            except AdaptrtError as error:
                raise ApiError.of(error) from error
            await self._adapters.add_trusted(model.name, source, replace=replace)

    def _check_size(self, size: int) -> None:
        limits = self._limits
        if size > limits.max_blob_bytes:
            raise ApiError(
                f"the file is larger than {limits.max_blob_bytes} bytes (the server's --max-blob-bytes)",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                kind=TOO_LARGE,
            )
        if self._num_bytes > limits.max_all_blobs_bytes:
            raise _full(
                f"the files have more than {limits.max_all_blobs_bytes} bytes together (the server's "
                "--max-all-blobs-bytes); delete models"
            )

    def _load_all(self) -> Sequence[CreatedModel]:
        for directory in (self._blobs, self._adapter_files, self._files):
            directory.mkdir(exist_ok=True)
        for path in self._blobs.glob(f"*{_PART}"):
            path.unlink()
        self._num_bytes = sum(path.stat().st_size for path in self._blobs.iterdir())
        return [CreatedModel.load(path) for path in sorted(self._files.glob("*.json"))]

    def _open_part(self) -> tuple[IO[bytes], Path]:
        number, name = tempfile.mkstemp(dir=self._blobs, suffix=_PART)
        return os.fdopen(number, "wb"), Path(name)

    def _adapter_source(self, files: Mapping[str, str]) -> Path | Source:
        """Returns the directory with an adapter's files. Raises AdaptrtError."""
        directory = self._directory_of(files)
        if not directory.is_dir():
            made = Path(tempfile.mkdtemp(dir=self._adapter_files, suffix=_PART))
            try:
                for name, digest in files.items():
                    blob = self._blobs / digest_of(digest)
                    if not blob.is_file():
                        raise ConfigError(f"adapters['{name}'] is {digest}; expected a file sent to /api/blobs before")
                    _link(blob, made / name)
                made.rename(directory)
            except BaseException:
                shutil.rmtree(made)
                raise
        names = list(files)
        if len(names) == 1 and names[0].endswith(_GGUF):
            source = find_adapter(directory / names[0])
            return source.directory if source.lease is None else source
        return directory

    def _directory_of(self, files: Mapping[str, str]) -> Path:
        """Returns the directory of an adapter. Equal files have the same directory."""
        listed = json.dumps(sorted((name, digest_of(digest)) for name, digest in files.items()))
        return self._adapter_files / hashlib.sha256(listed.encode()).hexdigest()

    def _file_of(self, name: str) -> Path:
        return self._files / f"{hashlib.sha256(name.encode()).hexdigest()}.json"

    def _write(self, model: CreatedModel) -> None:
        path = self._file_of(model.name)
        part = path.with_suffix(_PART)
        part.write_text(json.dumps(model.content(), indent=2) + "\n", encoding="utf-8")
        part.replace(path)

    def _delete_unused(self, old: CreatedModel, others: Sequence[CreatedModel]) -> None:
        """Deletes the files of an old model's adapter that no other model has."""
        if old.files and all(self._directory_of(old.files) != self._directory_of(other.files) for other in others):
            shutil.rmtree(self._directory_of(old.files), ignore_errors=True)
        used = {digest_of(digest) for other in others for digest in other.files.values()}
        for digest in {digest_of(digest) for digest in old.files.values()} - used:
            blob = self._blobs / digest
            if blob.is_file():
                self._num_bytes -= blob.stat().st_size
                blob.unlink()


def _full(said: str) -> ApiError:
    return ApiError(said, status=HTTPStatus.INSUFFICIENT_STORAGE, kind=BAD_REQUEST)


def _write(part: IO[bytes], hashed: Any, data: bytes) -> None:
    part.write(data)
    hashed.update(data)


def _link(blob: Path, path: Path) -> None:
    """Makes a file with the content of a blob, without a copy where the file system can."""
    try:
        os.link(blob, path)
    except OSError:
        shutil.copyfile(blob, path)

"""Adapters that are in memory: PEFT models, and state dicts with their config.

They are written to a private directory that is in memory too (tmpfs) where the system has one. The same code as for
other adapters then checks and reads them, also after the cache has evicted them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from safetensors.numpy import save_file as save_numpy

from .._core import AdapterError
from ..common.shown_value import shown
from ..formats.adapter.recognise import CONFIG_FILE, SAFETENSORS_FILE
from ..formats.sources import Source
from ..formats.sources.lease import Lease

_MEMORY: Final = Path("/dev/shm")
"""Linux's directory of files in memory."""
_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class LoraTensors:
    """An adapter in memory: tensors and their config."""

    tensors: Mapping[str, Any] = field(repr=False)
    """Tensors of torch or numpy by name, as peft.get_peft_model_state_dict() returns them."""
    config: Any
    """The PeftConfig, or the fields of adapter_config.json."""


class DirectoryLease(Lease):
    """Keeps a directory of MemoryAdapters until it is released."""

    def __init__(self, memory: MemoryAdapters, directory: Path) -> None:
        """directory: a result of write()."""
        self._file = None
        self._memory = memory
        self._directory = directory

    def release(self) -> None:
        """Deletes the directory."""
        self._memory.remove(self._directory)


class MemoryAdapters:
    """Directories of adapters that came from memory. Thread-safe. They are deleted by close(), or with the object."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._num_written = 0
        self._lock = threading.Lock()

    def write(self, source: Any, config: Any = None) -> Path:
        """Writes an adapter to a new directory. Raises AdapterError for a source that is no adapter.

        source: a PeftModel, whose active adapter is written as save_pretrained() does it; LoraTensors; or their
            tensors, with their `config`.
        """
        directory = self.new_directory()
        try:
            if is_peft_model(source):
                if config is not None:
                    raise AdapterError("config is given with a PeftModel, which has its own; expected none")
                return _save_model(source, directory)
            if isinstance(source, LoraTensors):
                if config is not None:
                    raise AdapterError("config is given with LoraTensors, which have their own; expected none")
                source, config = source.tensors, source.config
            _save_tensors(source, config, directory)
        except BaseException:
            self.remove(directory)
            raise
        return directory

    def source(self, directory: Path) -> Source:
        """Returns a directory of write() as a source. The directory is deleted when no request can ask for the adapter
        any more.
        """
        return Source("memory", directory, lease=DirectoryLease(self, directory))

    def source_of_files(self, directory: Path, files: Mapping[str, IO[bytes] | bytes], given: str) -> Source:
        """Writes files to a directory of new_directory(), and returns it like source(). given: the source's name.

        Raises OSError if there is no room; the directory is deleted then.
        """
        try:
            for name, content in files.items():
                (directory / name).parent.mkdir(exist_ok=True)
                with (directory / name).open("xb") as written:
                    if isinstance(content, bytes):
                        written.write(content)
                    else:
                        shutil.copyfileobj(content, written, _PIECE_BYTES)
        except BaseException:
            self.remove(directory)
            raise
        return Source(given, directory, lease=DirectoryLease(self, directory))

    def remove(self, directory: Path) -> None:
        """Deletes a directory of write(). Does nothing for another directory."""
        root = self._root
        if root is not None and directory.is_relative_to(root):
            shutil.rmtree(root / directory.relative_to(root).parts[0], ignore_errors=True)

    def close(self) -> None:
        """Deletes all directories."""
        with self._lock:
            if self._root is not None:
                self._delete()
                self._root = None

    def new_directory(self) -> Path:
        """Creates an empty directory."""
        with self._lock:
            if self._root is None:
                in_memory = _MEMORY if _MEMORY.is_dir() else None
                self._root = Path(tempfile.mkdtemp(prefix="adaptrt-", dir=in_memory))
                self._delete = weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
            directory = self._root / str(self._num_written)
            self._num_written += 1
        directory.mkdir()
        return directory


def is_peft_model(source: Any) -> bool:
    """True for a PeftModel. PEFT is not imported."""
    return callable(getattr(source, "save_pretrained", None)) and isinstance(getattr(source, "peft_config", None), dict)


def _save_model(model: Any, directory: Path) -> Path:
    active = model.active_adapters if hasattr(model, "active_adapters") else [model.active_adapter]
    names = [active] if isinstance(active, str) else list(active)
    if len(names) != 1:
        raise AdapterError(f"the PeftModel has {len(names)} active adapters; expected one (set_adapter)")
    model.save_pretrained(str(directory), selected_adapters=names)
    # PEFT writes an adapter that is not named "default" to a subdirectory.
    return directory if names == ["default"] else directory / names[0]


def _save_tensors(tensors: Any, config: Any, directory: Path) -> None:
    if not isinstance(tensors, Mapping):
        raise AdapterError(
            f"an adapter is {shown(tensors)}; expected its directory, a PeftModel, or its tensors by name with a config"
        )
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise AdapterError(
            f"config is {shown(config)}; expected the fields of the adapter's adapter_config.json, or its PeftConfig"
        )
    given = {str(name): _checked(name, tensor) for name, tensor in tensors.items()}
    path = str(directory / SAFETENSORS_FILE)
    # PEFT marks its files in this way.
    metadata = {"format": "pt"}
    if any(hasattr(tensor, "detach") for tensor in given.values()):
        from safetensors.torch import save_file as save_torch

        save_torch({name: tensor.detach().cpu().contiguous().clone() for name, tensor in given.items()}, path, metadata)
    else:
        save_numpy({name: np.ascontiguousarray(tensor) for name, tensor in given.items()}, path, metadata)
    text = json.dumps(dict(fields), default=_plain, indent=2, sort_keys=True)
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def _checked(name: object, tensor: Any) -> Any:
    if not isinstance(tensor, np.ndarray) and not hasattr(tensor, "detach"):
        raise AdapterError(f"tensor {name!r} is {shown(tensor)}; expected a tensor of torch or numpy")
    return tensor


def _plain(value: Any) -> Any:
    """Converts values of a PeftConfig as PEFT does it: sets to lists, enums to their values."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", str(value))

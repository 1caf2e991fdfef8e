"""Adapters on disk: those that an engine carries, by name, and prefetch directories of converted ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .._core import AdapterError, EngineError
from ..builder.adapter.convert import CONFIG_FILE, WEIGHTS_FILE
from ..builder.adapter_copy import adapter_checksum
from .engine import LoadedEngine
from .lora_config import LoraConfig

FIRST_NAMED_TASK_ID: Final = 1 << 63
"""Named adapters have this task_id and those that follow; the ids below are the caller's."""


class AdapterStore:
    """The third level of the LoRA cache: adapters that the engine directory carries, read when they are needed."""

    def __init__(self, engine: LoadedEngine) -> None:
        """Reads nothing yet."""
        self._engine = engine
        self._checksums = dict(zip(engine.adapters, engine.config.adapter_checksums, strict=True))
        self._task_ids = {name: FIRST_NAMED_TASK_ID + index for index, name in enumerate(engine.adapters)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names that adapters are served under."""
        return tuple(self._task_ids)

    def task_id(self, name: str) -> int:
        """The task_id that the executor knows this adapter by. Raises AdapterError for an unknown name."""
        if name not in self._task_ids:
            known = ", ".join(f"'{name}'" for name in self._task_ids) or "none"
            raise AdapterError(f"{self._engine.directory}: has no adapter named '{name}'; it has: {known}")
        return self._task_ids[name]

    def reference(self, name: str) -> LoraConfig:
        """The adapter by its task_id alone, for when it is cached."""
        return LoraConfig(self.task_id(name))

    def load(self, name: str) -> LoraConfig:
        """The adapter with its weights, read and converted now.

        Raises EngineError when its files are not those that the build copied, AdapterError with what is wrong with it.
        """
        task_id, directory = self.task_id(name), self._engine.adapters[name]
        try:
            checksum = adapter_checksum(directory)
        except OSError as error:
            raise EngineError(f"{directory}: adapter '{name}' cannot be read: {error}") from error
        if checksum != self._checksums[name]:
            raise EngineError(f"{directory}: adapter '{name}' was changed after the build. Build the engine again")
        return LoraConfig.from_peft(task_id, directory, self._engine)


def prefetched_adapters(directory: str | Path) -> Iterator[tuple[Path, LoraConfig]]:
    """The adapters of a prefetch directory in the order of their task_ids, each with its folder.

    A folder is named by its task_id's digits and holds model.lora_weights.npy and model.lora_config.npy. Raises
    AdapterError that names every entry that is no such folder, or the file that cannot be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise AdapterError(f"{directory}: is no directory, but lora_prefetch_dir names it")
    folders: dict[int, Path] = {}
    problems = []
    for folder in sorted(directory.iterdir()):
        if not folder.is_dir() or not (folder.name.isascii() and folder.name.isdigit()):
            problems.append(f"{folder} is no folder named by the digits of a task_id")
        elif int(folder.name) >= FIRST_NAMED_TASK_ID:
            problems.append(f"{folder} names a task_id of {FIRST_NAMED_TASK_ID} or more")
        elif int(folder.name) in folders:
            problems.append(f"{folder} and {folders[int(folder.name)]} name the same task_id")
        else:
            folders[int(folder.name)] = folder
    if problems:
        raise AdapterError(f"lora_prefetch_dir {directory}: " + "; ".join(problems))
    for task_id, folder in sorted(folders.items()):
        yield folder, LoraConfig(task_id, _load_array(folder / WEIGHTS_FILE), _load_array(folder / CONFIG_FILE))


def _load_array(path: Path) -> npt.NDArray[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise AdapterError(f"{path}: cannot be read as a NumPy array: {error}") from error
    if not isinstance(loaded, np.ndarray):
        loaded.close()
        raise AdapterError(f"{path}: is an archive of arrays; expected one array")
    return loaded

"""Prefetch directories of converted adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import AdapterError, LoraConfig
from ..builder.adapter.convert import CONFIG_FILE, WEIGHTS_FILE
from .named_adapter import FIRST_NAMED_TASK_ID


def prefetched_adapters(directory: str | Path) -> Iterator[tuple[Path, LoraConfig]]:
    """The adapters of a prefetch directory in the order of their task_ids, each with its folder.

    A folder is named by its task_id's digits and holds model.lora_weights.npy and model.lora_config.npy. Raises
    AdapterError that names every entry that is no such folder, or the file that cannot be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise AdapterError(f"{directory}: is not a directory, but lora_prefetch_dir names it")
    folders: dict[int, Path] = {}
    problems = []
    for folder in sorted(directory.iterdir()):
        if not folder.is_dir() or not (folder.name.isascii() and folder.name.isdigit()):
            problems.append(f"{folder} is not a folder named by the digits of a task_id")
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

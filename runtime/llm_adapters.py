"""LLM's methods that load and unload adapters, and the meaning of its argument `lora`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from .._core import AdapterError, RequestError
from ..formats.sources.sum_of_names import parse_sum
from .executor import Executor
from .memory_adapters import MemoryAdapters, is_peft_model
from .named_adapter import NamedAdapter
from .sampling_fields import shown

Lora: TypeAlias = str | os.PathLike[str]
"""Name of an adapter, a weighted sum of names, or the path of an adapter's directory."""


class LoadedAdapters:
    """Part of LLM that loads and unloads adapters."""

    _executor: Executor
    _memory: MemoryAdapters

    def load_lora(self, name: str, lora: Any, *, config: Any = None, replace: bool = False) -> NamedAdapter:
        """Reads an adapter, caches it and makes its name known; the arguments `lora` of methods then accept it.

        lora: a directory or name, as Executor.add_adapter() takes it; a PeftModel, whose active adapter is taken; or a
            state dict of torch or numpy tensors, as peft.get_peft_model_state_dict() returns it. Adapters in memory are
            copied, and equal the adapter that save_pretrained() writes.
        config: for a state dict: the PeftConfig, or the fields of adapter_config.json.
        replace: True: the name may be known already. Running requests keep the old adapter.

        Raises AdapterError for a taken name and for an adapter that cannot be served, LoraCacheFullError, EngineError
        if its files cannot be read. Nothing has changed then.
        """
        source: str | Path
        if isinstance(lora, str | os.PathLike):
            if config is not None:
                raise AdapterError("config is given with a directory, which has its own; expected none")
            source, is_own = lora if isinstance(lora, str) else Path(lora), False
        else:
            source, is_own = self._memory.write(lora, config), True
        before = self._executor.adapters.get(name) if self._executor.adapters.knows(name) else None
        try:
            adapter = self._executor.add_adapter(name, source, replace=replace)
        except BaseException:
            if is_own:
                self._memory.remove(Path(source))
            raise
        if before is not None:
            self._memory.remove(before.directory)
        return adapter

    def unload_lora(self, name: str) -> None:
        """Removes an adapter from all cache levels. Running requests keep it. Raises AdapterError if it is unknown."""
        directory = self._executor.adapters.get(name).directory
        self._executor.remove_adapter(name)
        self._memory.remove(directory)

    def list_loras(self) -> list[str]:
        """Returns the names of the adapters: those that the engine carries, and loaded ones."""
        return list(self._executor.adapters.names)

    def _name_of(self, lora: Lora | None) -> str | None:
        """Returns the name of an adapter. An unknown name that is a directory is loaded, with its path as name.

        Raises AdapterError for a value that is neither a name nor a path, and the errors of load_lora().
        """
        if lora is None or (isinstance(lora, str) and self._executor.adapters.knows(lora)):
            return lora
        if not isinstance(lora, str | os.PathLike):
            given = f"a {type(lora).__name__} (load_lora() gives it a name)" if is_peft_model(lora) else shown(lora)
            raise AdapterError(f"lora is {given}; expected the name or the path of an adapter")
        path = Path(lora)
        if not path.is_dir() or (isinstance(lora, str) and parse_sum(lora) is not None):
            return os.fspath(lora)
        name = str(path.absolute())
        if not self._executor.adapters.knows(name):
            try:
                self._executor.add_adapter(name, path)
            except AdapterError:
                # Another thread may have added it.
                if not self._executor.adapters.knows(name):
                    raise
        return name

    def _names_of(self, num_texts: int, lora: Lora | Sequence[Lora | None] | None) -> list[str | None]:
        """Returns each text's adapter name. Raises like _name_of(), and RequestError if their numbers differ."""
        if lora is None or isinstance(lora, str | os.PathLike) or not isinstance(lora, Sequence):
            return [self._name_of(lora)] * num_texts
        if len(lora) != num_texts:
            raise RequestError(f"lora has {len(lora)} names for {num_texts} prompts; expected one per prompt")
        return [self._name_of(name) for name in lora]

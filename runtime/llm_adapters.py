"""LLM's methods that load and unload adapters, and the meaning of its argument `lora`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from .._core import AdapterError, RequestError
from ..common.shown_value import shown
from ..formats.sources import LocalName, Source, parse_name, weighted_sum_name
from ..formats.sources.sum_of_names import parse_sum
from .executor import Executor
from .lora_request import LoRARequest, is_lora_request
from .memory_adapters import LoraTensors, MemoryAdapters, is_peft_model
from .named_adapter import NamedAdapter
from .text_requests import TextRequests
from .unnamed_adapters import HeldAdapters, UnnamedAdapters

if TYPE_CHECKING:
    from peft import PeftModel

Lora: TypeAlias = Union[str, os.PathLike[str], LoraTensors, LoRARequest, "PeftModel"]
"""Name of an adapter, a weighted sum of names, an adapter's directory or name in a store, a LoRARequest, or an adapter
in memory."""


class LoadedAdapters:
    """Part of LLM that loads and unloads adapters."""

    _executor: Executor
    _memory: MemoryAdapters
    _unnamed: UnnamedAdapters
    _sources: dict[str, tuple[str, Path]]
    """Given path or name in a store, and directory, of each adapter that was loaded from one."""

    @property
    def _requests(self) -> TextRequests:
        """Makes requests. Raises RequestError on ranks other than 0."""
        raise NotImplementedError

    def load_lora(self, name: str, lora: Any, *, config: Any = None, replace: bool = False) -> NamedAdapter:
        """Reads an adapter, caches it and makes its name known; the arguments `lora` of methods then accept it.

        lora: a directory or name, as Executor.add_adapter() takes it; a PeftModel, whose active adapter is taken; or a
            state dict of torch or numpy tensors, as peft.get_peft_model_state_dict() returns it, alone or as
            LoraTensors. Adapters in memory are copied, and equal the adapter that save_pretrained() writes.
        config: for a state dict alone: the PeftConfig, or the fields of adapter_config.json.
        replace: True: accepts a name that is known already. Running requests keep the old version, and others can ask
            for it as NAME@DIGEST.

        An adapter_proof.json in its directory is checked: see docs/formats.md.

        Raises AdapterError for a taken name and for an adapter that cannot be served, LoraCacheFullError, EngineError
        if its files cannot be read. Nothing has changed then.
        """
        source: str | Path | Source
        if isinstance(lora, str | os.PathLike):
            if config is not None:
                raise AdapterError("config is given with a directory, which has its own; expected none")
            source, is_own = lora if isinstance(lora, str) else Path(lora), False
        else:
            source, is_own = self._memory.source(self._memory.write(lora, config)), True
        try:
            check = self._requests.check_proof
            adapter = self._executor.add_adapter(name, source, replace=replace, check=check)
        except BaseException:
            if is_own:
                self._memory.remove(Path(source))
            raise
        if not is_own:
            self._sources[name] = os.fspath(source), adapter.directory
        return adapter

    def unload_lora(self, name: str) -> None:
        """Removes an adapter and its old versions from all cache levels. Running requests keep them.

        Raises AdapterError if it is unknown.
        """
        self._executor.remove_adapter(name)
        self._sources.pop(name, None)

    def list_loras(self) -> list[str]:
        """Returns the names of the adapters: those that the engine carries, and loaded ones.

        Adapters in memory that the argument `lora` brought have names that begin with "in-memory-".
        """
        return list(self._executor.adapters.names)

    def _hold(self, num_texts: int, lora: Lora | Sequence[Lora | None] | None) -> HeldAdapters:
        """Returns the version of each text's adapter, and keeps it, and unnamed adapters, as long as the result.

        Loads a directory, a repository of the Hub or a prefix of an object store under its path or name, and an adapter
        in memory under a name that is made from its content. Raises AdapterError for other values, RequestError if a
        list has another length than the texts, and the errors of load_lora().
        """
        held = HeldAdapters()
        if not isinstance(lora, Sequence) or isinstance(lora, str):
            held.names += [self._version_of(lora, held)] * num_texts
            return held
        if len(lora) != num_texts:
            raise RequestError(f"lora has {len(lora)} names for {num_texts} prompts; expected one per prompt")
        in_memory: dict[int, str | None] = {}
        for one in lora:
            if one is None or isinstance(one, str | os.PathLike):
                held.names.append(self._version_of(one, held))
                continue
            if id(one) not in in_memory:
                in_memory[id(one)] = self._version_of(one, held)
            held.names.append(in_memory[id(one)])
        return held

    def _version_of(self, lora: Lora | None, held: HeldAdapters) -> str | None:
        """Returns NAME@DIGEST, so that tokenizer, template and weights are of one version if the name changes."""
        name, store = self._name_of(lora, held), self._executor.adapters
        if name is None:
            return None
        version = store.version_name(name)
        if version is None:
            store.prepare(name)
            version = store.version_name(name)
        if version is None:
            return name
        held.versions += store.hold(version)
        return version

    def _name_of(self, lora: Lora | None, held: HeldAdapters) -> str | None:
        if lora is None or (isinstance(lora, str) and self._is_known(lora)):
            return lora
        if is_lora_request(lora):
            return self._requested(LoRARequest.of(lora))
        if isinstance(lora, LoraTensors) or is_peft_model(lora):
            return self._unnamed.hold(lora, held)
        if isinstance(lora, Mapping):
            raise AdapterError(
                "lora is a dictionary; expected LoraTensors(tensors, config), because tensors have no alpha and ranks"
            )
        if not isinstance(lora, str | os.PathLike):
            raise AdapterError(
                f"lora is {shown(lora)}; expected the name or the path of an adapter, a LoRARequest, a PeftModel, or "
                "LoraTensors"
            )
        return self._loaded(lora)

    def _is_known(self, name: str) -> bool:
        """True for the name of an adapter or of a version."""
        return self._executor.adapters.knows(name) or self._executor.adapters.has_version(name)

    def _requested(self, request: LoRARequest) -> str:
        """Loads the adapter of a request unless its name is known. Returns the name."""
        name, path = request.lora_name, request.lora_path
        known = self._executor.adapters.get(name) if self._executor.adapters.knows(name) else None
        if not path:
            return name  # an unknown name is refused with the names that there are
        if known is None:
            self._add(name, path)
        elif request.load_inplace:
            self.load_lora(name, path, replace=True)
        elif self._sources.get(name) != (os.fspath(path), known.directory) and Path(path).absolute() != known.directory:
            raise AdapterError(
                f"LoRARequest: lora_path is {shown(os.fspath(path))}, and adapter '{name}' was loaded from "
                f"{known.directory}; expected its path or none, another lora_name, or load_inplace=True"
            )
        return name

    def _loaded(self, lora: str | os.PathLike[str]) -> str:
        """Loads an unknown name if it is a directory, a name in a store, or a sum of these. Returns the name for
        requests.
        """
        named = weighted_sum_name(lora)
        if named is None:
            return self._loaded_term(lora)
        names = tuple(term if self._is_known(term) else self._loaded_term(term) for term in named.names)
        if names == named.names:
            return os.fspath(lora)
        text = "+".join(f"{name}:{weight!r}" for name, (_, weight) in zip(names, named.terms, strict=True))
        found = parse_sum(text)
        if found is None or found.names != names:
            raise AdapterError(
                f"lora is '{lora}', a weighted sum of the paths {', '.join(names)}; expected paths without '+', or "
                "names that load_lora() gave"
            )
        return text

    def _loaded_term(self, lora: str | os.PathLike[str]) -> str:
        if not isinstance(parse_name(lora, AdapterError), LocalName):
            return self._add(os.fspath(lora), os.fspath(lora))
        path = Path(lora)
        return self._add(_name_of_path(path), path) if path.is_dir() else os.fspath(lora)

    def _add(self, name: str, source: str | os.PathLike[str]) -> str:
        """Loads an adapter unless its name is known. Returns the name."""
        if not self._executor.adapters.knows(name):
            try:
                self.load_lora(name, source)
            except AdapterError:
                # Another thread may have added it.
                if not self._executor.adapters.knows(name):
                    raise
        return name


def _name_of_path(path: Path) -> str:
    """The absolute path; with a slash at its end if it would be read as a weighted sum."""
    name = str(path.absolute())
    return name if parse_sum(name) is None else name + "/"

"""Keeps old names of modules of this package importable: they moved to other rooms, or to other places in here."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

_BUILDER: Final = __name__.rpartition(".")[0]
_PACKAGE: Final = _BUILDER.rpartition(".")[0]

MOVED: Final = {
    "adapter": "formats.adapter",
    "adapter.sum_of_names": "formats.sources.sum_of_names",
    "adapter_copy": "formats.adapter.adapter_copy",
    "adapter_fit": "builder.engine.adapter_fit",
    "build_problems": "builder.engine.problems",
    "byte_size": "common.byte_size",
    "carried_adapters": "builder.engine.carried_adapters",
    "checkpoint": "formats.checkpoint",
    "compile.bind": "formats.engine.bind",
    "compile.engine_file": "formats.engine.engine_file",
    "compile.plan": "formats.engine.plan",
    "compile.plan_json": "formats.engine.plan_json",
    "compile.tensorrt.capability": "formats.engine.tensorrt.capability",
    "compile.tensorrt.package": "formats.engine.tensorrt.package",
    "compile.tensorrt.plan_config": "formats.engine.tensorrt.plan_config",
    "config": "formats.engine.build_config",
    "conversion.hf_config": "formats.hugging_face.hf_config",
    "conversion.published.awq": "formats.hugging_face.published.awq",
    "conversion.published.bitsandbytes": "formats.hugging_face.published.bitsandbytes",
    "conversion.published.compressed_tensors": "formats.hugging_face.published.compressed_tensors",
    "conversion.published.config": "formats.hugging_face.published.config",
    "conversion.published.formats": "formats.hugging_face.published.formats",
    "conversion.published.fp8": "formats.hugging_face.published.fp8",
    "conversion.published.gptq": "formats.hugging_face.published.gptq",
    "conversion.published.mxfp4": "formats.hugging_face.published.mxfp4",
    "conversion.published.packed_numbers": "formats.hugging_face.published.packed_numbers",
    "conversion.sentence_transformers": "formats.hugging_face.sentence_transformers",
    "engine_config": "formats.engine.engine_config",
    "engine_directory": "builder.engine.directory",
    "engine_quality": "formats.engine.engine_quality",
    "file_digest": "common.file_digest",
    "file_lock": "common.file_lock",
    "json_fields": "common.json_fields",
    "models": "formats.models",
    "network_options": "builder.network.onnx_graph",
    "network.adapter_sites": "formats.network.adapter_sites",
    "network.declared_attention": "formats.network.declared_attention",
    "network.declared_ops": "formats.network.declared_ops",
    "network.network": "formats.network.network",
    "network.operands": "formats.network.operands",
    "network.ops": "formats.network.ops",
    "network.weights": "formats.network.weights",
    "number_flags": "common.number_flags",
    "output_directory": "common.output_directory",
    "process_memory": "common.process_memory",
    "progress": "common.progress",
    "regular_file": "common.regular_file",
    "safetensors_stream": "common.safetensors_stream",
    "template_files": "formats.template_files",
    "weight_usage": "formats.engine.weight_usage",
}
"""New names by old names. Old ones are relative to this package, new ones to its parent. A package stands for all of
its modules."""


def new_name(name: str) -> str | None:
    """Full new name of the module with the full old name `name`; None if no module of that name was moved."""
    if not name.startswith(f"{_BUILDER}."):
        return None
    moved, inner = name[len(_BUILDER) + 1 :], ""
    while moved and moved not in MOVED:
        moved, _, last = moved.rpartition(".")
        inner = f".{last}{inner}"
    return f"{_PACKAGE}.{MOVED[moved]}{inner}" if moved else None


def install() -> None:
    """Makes the old names importable. They give the same modules as the new names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # First in the list, because other finders would find a moved package's files by path and run them a second
        # time.
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        new = new_name(fullname)
        return None if new is None else ModuleSpec(fullname, _Loader(new), is_package=True)


class _Loader(Loader):
    """Gives the import system the module with the new name."""

    def __init__(self, new: str) -> None:
        self._new = new
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._new)
        # Two levels up is the importing code: Python skips the import system's own frames.
        warnings.warn(f"{spec.name} is now {self._new}", DeprecationWarning, stacklevel=2)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # The import system replaced the spec with the old name's.

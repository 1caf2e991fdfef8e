"""LoraConfig: what a request says of its adapter, and how it is made from a PEFT directory."""

from __future__ import annotations

from pathlib import Path

from .. import _core
from ..builder.adapter import convert_adapter
from .engine import LoadedEngine, load_engine


class LoraConfig(_core.LoraConfig):
    """A request's adapter: LoraConfig(task_id, weights, config) with the first request, LoraConfig(task_id) later."""

    @classmethod
    def from_peft(
        cls,
        task_id: int,
        directory: str | Path,
        engine: LoadedEngine | str | Path,
        *,
        magnitudes_normalized: bool = False,
        replace: bool = False,
    ) -> LoraConfig:
        """Reads a PEFT adapter for this engine; no files are written.

        `engine` is an engine directory, or what load_engine made of it (Executor.engine): that saves the reading.
        DoRA magnitudes that are not marked as normalised are normalised by the engine's own weights, unless
        `magnitudes_normalized` gives the caller's word that they are. Raises AdapterError that names every tensor and
        field that cannot be used.
        """
        loaded = engine if isinstance(engine, LoadedEngine) else load_engine(engine)
        layout = loaded.lora
        if not layout.sites:
            raise _core.AdapterError(
                f"{directory}: the engine {loaded.directory} was built without LoRA; build it with --lora_plugin"
            )
        converted = convert_adapter(
            directory,
            storage_dtype=layout.dtype,
            base=loaded.base_weights(),
            shape=layout.shape,
            num_layers=layout.num_layers,
            magnitudes_normalized=magnitudes_normalized,
        )
        return cls(task_id, converted.weights, converted.config, replace=replace)

"""Checks that an engine can serve an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..._core import AdapterError, dtype_name, lora_modules
from ...formats.adapter import (
    MAGNITUDE,
    SHIFT,
    ConvertedAdapter,
    convert_adapter,
    is_prompt_tuned,
    read_prompt_embeddings,
)
from ...formats.engine.build_config import CUDA, NATIVE, TENSORRT, BuildConfig
from ...formats.network.adapter_sites import ROUTER, AdaptedModules, is_of_experts, is_of_vocabulary, is_target
from ...formats.network.network import Network


def adapter_for(
    directory: Path, config: BuildConfig, network: Network, target_modules: Sequence[str]
) -> ConvertedAdapter:
    """Converts an adapter to the rows that an engine of this network and configuration serves.

    target_modules: modules that the engine adapts; empty: the adapters decide.

    Raises AdapterError that lists everything wrong with the adapter, or with its rows for this engine.
    """
    if not config.lora_enabled:
        raise AdapterError(f"{directory}: the engine was built without LoRA; build it with --lora_plugin")
    adapter = convert_adapter(
        directory,
        storage_dtype=dtype_name(network.config.dtype),
        modules=AdaptedModules(network),
        # An engine that gives its weights back normalises raw magnitudes when it serves the adapter.
        magnitudes_normalized=config.gives_weights_back,
        limits=config.lora_config.adapter_limits,
        values_left_open=True,
        classifiers=True,
    )
    problems = []
    if (adapter.config[0, :, 3] & MAGNITUDE).any() and not config.dora_enabled:
        problems.append("the adapter has factors (DoRA or IA3), which need an engine with dora_plugin enable")
    if config.backend == TENSORRT and (adapter.config[0, :, 3] & SHIFT).any():
        problems.append("the adapter has shifts (of biases), which TensorRT engines do not add")
    native_only = [name for name in modules_of(adapter) if not can_adapt(config.backend, name)]
    if native_only:
        problems.append(f"the adapter changes {', '.join(native_only)}, which needs backend {NATIVE}")
    missing = [name for name in modules_of(adapter) if target_modules and name not in target_modules]
    if missing:
        problems.append(f"the adapter changes {', '.join(missing)}, which lora_target_modules does not include")
    if problems:
        raise AdapterError(f"{directory}: " + "; ".join(problems))
    return adapter


def modules_changed_by(directory: Path, config: BuildConfig, network: Network) -> list[str]:
    """Names of the modules that an adapter changes; empty for virtual tokens. Raises as adapter_for()."""
    if not is_prompt_tuned(directory):
        return modules_of(adapter_for(directory, config, network, target_modules=()))
    require_virtual_tokens(directory, config, network)
    return []


def require_virtual_tokens(directory: Path, config: BuildConfig, network: Network) -> None:
    """Raises AdapterError if the virtual tokens are invalid, or if the engine takes none."""
    read_prompt_embeddings(directory, AdaptedModules(network))
    if config.backend != NATIVE or network.config.mapping.world_size > 1:
        raise AdapterError(
            f"{directory}: the adapter has virtual tokens; expected an engine with backend {NATIVE} and one rank"
        )


def can_adapt(backend: str, module: str) -> bool:
    """True if engines of a backend adapt a module."""
    if backend in (NATIVE, CUDA):
        return True
    return not (is_of_experts(module) or is_of_vocabulary(module) or module == ROUTER)


def modules_of(adapter: ConvertedAdapter) -> list[str]:
    """Names of the modules of the model that an adapter changes, in the order of their ids."""
    ids = set(adapter.config[0, :, 0].tolist())
    return [info.name for info in lora_modules() if info.id in ids and is_target(info)]

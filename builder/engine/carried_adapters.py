"""Adapters of --lora_dir: checks that the engine can serve them, and copies them into its directory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..._core import AdapterError, ConfigError, lora_modules
from ...formats.adapter.adapter_copy import copy_adapter
from ...formats.engine.build_config import BuildConfig
from ...formats.engine.engine_config import ADAPTERS_DIRECTORY
from ...formats.network.adapter_sites import AdaptedModules
from ...formats.network.network import Network
from ...formats.sources.sum_of_names import parse_sum
from .adapter_fit import can_adapt, modules_changed_by


def with_adapters(config: BuildConfig, network: Network) -> BuildConfig:
    """Adds target modules and adapter names to the config, after checking that the engine can serve the adapters."""
    if not config.lora_enabled:
        return config
    lora = config.lora_config
    directories = [Path(directory) for directory in lora.lora_dir]
    names = lora.adapter_names or tuple(Path(os.path.realpath(directory)).name for directory in directories)
    _check_names(names, directories)
    used = _modules_of_adapters(directories, config, network)
    modules = lora.lora_target_modules or tuple(
        info.name for info in lora_modules() if any(info.name in adapter for adapter in used)
    )
    of_model = AdaptedModules(network)
    modules = modules or tuple(name for name in of_model.names if can_adapt(config.backend, name))
    absent = [name for name in modules if not of_model.has(name)]
    if absent:
        accepted = [info.name for info in lora_modules() if of_model.has(info.name)]
        raise ConfigError(
            f"lora_target_modules names {', '.join(absent)}, which {network.config.architecture} does not have; "
            f"accepted: {', '.join(accepted)}"
        )
    problems = []
    for directory, adapter in zip(directories, used, strict=True):
        missing = [name for name in adapter if name not in modules]
        if missing:
            problems.append(f"{directory} changes {', '.join(missing)}, which lora_target_modules does not include")
    if problems:
        raise AdapterError("; ".join(problems))
    return replace(config, lora_config=replace(lora, lora_target_modules=modules, adapter_names=names))


def _check_names(names: Sequence[str], directories: Sequence[Path]) -> None:
    """Raises ConfigError unless every name is plain and unique, because adapters are served by name."""
    if len(names) != len(directories):
        raise ConfigError(f"adapter_names has {len(names)} names for {len(directories)} lora_dir directories")
    for name, directory in zip(names, directories, strict=True):
        if not re.fullmatch(r"[^\x00-\x1f/]+", name):
            raise ConfigError(f"lora_dir {directory}: {name!r} is not valid as an adapter's name")
        if parse_sum(name) is not None:
            raise ConfigError(
                f"lora_dir {directory}: the adapter's name is '{name}', which is a weighted sum; expected another name"
            )
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ConfigError(f"lora_dir: adapters are served by their directories' names; {', '.join(twice)} occurs twice")


def _modules_of_adapters(directories: Sequence[Path], config: BuildConfig, network: Network) -> list[list[str]]:
    """Modules that each adapter changes. Raises AdapterError that lists all that is wrong with any of them."""
    used, problems = [], []
    for directory in directories:
        try:
            used.append(modules_changed_by(directory, config, network))
        except AdapterError as error:
            problems.append(str(error))
    if problems:
        raise AdapterError("; ".join(problems))
    return used


def copy_adapters(config: BuildConfig, directory: Path) -> tuple[BuildConfig, tuple[str, ...]]:
    """Copies the adapters into the engine directory. Returns the config with their new paths, and their checksums."""
    sources = config.lora_config.lora_dir
    places = tuple(Path(ADAPTERS_DIRECTORY) / str(number) for number in range(len(sources)))
    checksums = tuple(copy_adapter(source, directory / place) for source, place in zip(sources, places, strict=True))
    return replace(config, lora_config=replace(config.lora_config, lora_dir=places)), checksums

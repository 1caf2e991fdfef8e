"""Registers the plugins' creators with a TensorRT registry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..._core import EngineError
from .. import PLUGINS
from ..definition import NAMESPACE, VERSION, Plugin
from ..kernel_node import KernelModule
from .creator import Creator, make_creator
from .problems import Problems


class Registration:
    """Creators in a registry. Keep it alive as long as anything that is built or run with them."""

    def __init__(self, registry: Any) -> None:
        """Nothing is registered yet."""
        self._registry = registry
        self._creators: list[Creator] = []
        self._problems: Problems = []

    @property
    def creators(self) -> tuple[Creator, ...]:
        """One creator per plugin."""
        return tuple(self._creators)

    def take_problems(self) -> list[str]:
        """Errors in plugins since the last call. TensorRT itself only reports that an error occurred."""
        taken = list(self._problems)
        self._problems.clear()
        return taken

    def add(self, trt: Any, plugin: Plugin, kernels: KernelModule | None) -> None:
        """Registers one plugin. Raises EngineError if the registry already has one with this name, version and
        namespace."""
        creator = make_creator(trt, plugin, self._problems, kernels)
        if not self._registry.register_creator(creator, NAMESPACE):
            raise EngineError(
                f"TensorRT's registry refuses plugin {NAMESPACE}::{plugin.name} version {VERSION}: it has one already"
            )
        self._creators.append(creator)

    def close(self) -> None:
        """Removes the creators from the registry."""
        while self._creators:
            self._registry.deregister_creator(self._creators.pop())


def register_plugins(
    trt: Any,
    registry: Any,
    kernels: KernelModule | None = None,
    plugins: Iterable[Plugin] = PLUGINS,
) -> Registration:
    """Registers the plugins with `registry`: get_plugin_registry() of a Builder or Runtime.

    trt: the module, `tensorrt` or `tensorrt_rtx`.
    kernels: adaptrt._cuda to run plans; None to build them.

    Raises EngineError; then nothing is registered.
    """
    registration = Registration(registry)
    try:
        for plugin in plugins:
            registration.add(trt, plugin, kernels)
    except BaseException:
        registration.close()
        raise
    return registration

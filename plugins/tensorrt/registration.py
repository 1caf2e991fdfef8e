"""Puts the plugins' creators into a registry of TensorRT."""

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
    """Creators in a registry. It must live as long as anything that is built or run with them."""

    def __init__(self, registry: Any) -> None:
        """Nothing is registered yet."""
        self._registry = registry
        self._creators: list[Creator] = []
        self._problems: Problems = []

    @property
    def creators(self) -> tuple[Creator, ...]:
        """One for each plugin."""
        return tuple(self._creators)

    def take_problems(self) -> list[str]:
        """What went wrong in plugins since the last call. TensorRT itself only says that something did."""
        taken = list(self._problems)
        self._problems.clear()
        return taken

    def add(self, trt: Any, plugin: Plugin, kernels: KernelModule | None) -> None:
        """Registers one plugin. Raises EngineError when the registry has one of this name, version and namespace."""
        creator = make_creator(trt, plugin, self._problems, kernels)
        if not self._registry.register_creator(creator, NAMESPACE):
            raise EngineError(
                f"TensorRT's registry refuses plugin {NAMESPACE}::{plugin.name} version {VERSION}: it has one already"
            )
        self._creators.append(creator)

    def close(self) -> None:
        """Takes the creators out of the registry."""
        while self._creators:
            self._registry.deregister_creator(self._creators.pop())


def register_plugins(
    trt: Any,
    registry: Any,
    kernels: KernelModule | None = None,
    plugins: Iterable[Plugin] = PLUGINS,
) -> Registration:
    """Registers the plugins with `registry`, a Builder's or Runtime's own: get_plugin_registry().

    trt: the module, `tensorrt` or `tensorrt_rtx`.
    kernels: adaptrt._cuda to run plans with; None to build them.

    Raises EngineError; nothing is registered then.
    """
    registration = Registration(registry)
    try:
        for plugin in plugins:
            registration.add(trt, plugin, kernels)
    except BaseException:
        registration.close()
        raise
    return registration

"""Ops for onnx.reference that run the plugins' reference maths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onnx.reference.op_run import OpRun

from .definition import DOMAIN, Array, Plugin


def make_reference_op(plugin: Plugin) -> type[OpRun]:
    """A class for ReferenceEvaluator(model, new_ops=[...]). It raises ValueError where plugin.check objects."""

    def run(self: OpRun, *inputs: Array, **_: Any) -> tuple[Array, ...]:
        attributes = {
            attribute.name: getattr(self, attribute.name, attribute.default) for attribute in plugin.attributes
        }
        problems = _bind(plugin, inputs)
        if not problems:
            problems = plugin.check(_sizes(plugin, inputs), attributes)
        if problems:
            raise ValueError(f"{plugin.name}: " + "; ".join(problems))
        return plugin.evaluate(inputs, attributes)

    return type(
        plugin.name,
        (OpRun,),
        {"op_domain": DOMAIN, "_run": run, "__doc__": plugin.doc, "__module__": __name__},
    )


def reference_ops(plugins: Iterable[Plugin]) -> list[type[OpRun]]:
    """make_reference_op of each."""
    return [make_reference_op(plugin) for plugin in plugins]


def _sizes(plugin: Plugin, inputs: Iterable[Array]) -> dict[str, int]:
    return {
        name: size
        for tensor, array in zip(plugin.inputs, inputs, strict=True)
        for name, size in zip(tensor.shape, array.shape, strict=True)
        if isinstance(name, str)
    }


def _bind(plugin: Plugin, inputs: tuple[Array, ...]) -> list[str]:
    """Where the inputs' shapes differ from the definition or from one another."""
    if len(inputs) != len(plugin.inputs):
        return [f"has {len(inputs)} inputs; expected {len(plugin.inputs)}"]
    sizes: dict[str, int] = {}
    problems = []
    for tensor, array in zip(plugin.inputs, inputs, strict=True):
        if array.ndim != len(tensor.shape):
            problems.append(f"input {tensor.name} has {array.ndim} dimensions; expected {len(tensor.shape)}")
            continue
        for name, size in zip(tensor.shape, array.shape, strict=True):
            expected = name if isinstance(name, int) else sizes.setdefault(name, size)
            if size != expected:
                problems.append(f"input {tensor.name} has {size} where '{name}' is {expected}")
    return problems

"""Ops for onnx.reference that run the plugins' reference implementations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onnx.reference.op_run import OpRun

from .definition import DOMAIN, Array, Plugin
from .sizes import bind_sizes


def make_reference_op(plugin: Plugin) -> type[OpRun]:
    """A class for ReferenceEvaluator(model, new_ops=[...]). It raises ValueError if plugin.check finds a problem."""

    def run(self: OpRun, *inputs: Array, **_: Any) -> tuple[Array, ...]:
        attributes = {
            attribute.name: getattr(self, attribute.name, attribute.default) for attribute in plugin.attributes
        }
        sizes, problems = bind_sizes(plugin, [array.shape for array in inputs])
        if not problems:
            problems = plugin.check(sizes, attributes)
        if problems:
            raise ValueError(f"{plugin.name}: " + "; ".join(problems))
        return plugin.evaluate(inputs, attributes)

    return type(
        plugin.name,
        (OpRun,),
        {"op_domain": DOMAIN, "_run": run, "__doc__": plugin.doc, "__module__": __name__},
    )


def reference_ops(plugins: Iterable[Plugin]) -> list[type[OpRun]]:
    """Calls make_reference_op for each plugin."""
    return [make_reference_op(plugin) for plugin in plugins]

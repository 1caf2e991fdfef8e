"""Creators: TensorRT finds them by a plugin's name, version and namespace, and creates nodes with them."""

from __future__ import annotations

from typing import Any

from ..._core import EngineError
from ..definition import NAMESPACE, VERSION, Plugin
from ..kernel_node import KernelModule, KernelNode
from .fields import attributes_of, requested_fields
from .node import Node, make_node_class
from .problems import Problems, reported


class Creator:
    """IPluginCreatorV3One; make_creator() adds TensorRT's base class."""

    _trt: Any
    definition: Plugin

    def __init__(self, problems: Problems, kernels: KernelModule | None) -> None:
        """Without `kernels` it creates nodes for building plans only."""
        self._trt.IPluginCreatorV3One.__init__(self)
        self.problems = problems
        self._kernels = kernels
        self._node_class = make_node_class(self._trt, self.definition)
        self.name = self.definition.name
        self.plugin_version = VERSION
        self.plugin_namespace = NAMESPACE
        self._fields = requested_fields(self._trt, self.definition)
        self.field_names = self._fields.collection

    @reported
    def create_plugin(self, name: str, fields: Any, phase: Any) -> Node:
        """Creates a node. Raises EngineError that names it and the problems of its fields."""
        subject = f"{self.definition.name} node '{name}'"
        attributes = attributes_of(self._trt, self.definition, fields, subject)
        kernel = None
        if phase == self._trt.TensorRTPhase.RUNTIME:
            if self._kernels is None:
                raise EngineError(f"{subject}: there are no CUDA kernels to run it with")
            kernel = KernelNode(self.definition, attributes, self._kernels)
        return self._node_class(attributes, subject, self.problems, kernel)


def make_creator(trt: Any, definition: Plugin, problems: Problems, kernels: KernelModule | None) -> Creator:
    """A plugin's creator for one of TensorRT's modules."""
    members = {"_trt": trt, "definition": definition, "__doc__": f"Creator of {definition.name} nodes."}
    creator_class: type[Creator] = type(f"{definition.name}Creator", (Creator, trt.IPluginCreatorV3One), members)
    return creator_class(problems, kernels)

"""The class of a plugin's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..definition import NAMESPACE, VERSION, Plugin
from ..kernel_node import KernelNode
from .build_half import BuildHalf
from .element_types import engine_type_index
from .fields import fields_of
from .problems import Problems
from .run_half import RunHalf


class Node(BuildHalf, RunHalf):
    """IPluginV3 and IPluginV3OneCore; make_node_class() adds TensorRT's base classes."""

    interfaces: tuple[Any, ...]

    def __init__(self, attributes: Mapping[str, Any], subject: str, problems: Problems, kernel: KernelNode | None):
        """`subject` begins the node's error messages; `kernel` is None while a plan is built."""
        for interface in self.interfaces:
            interface.__init__(self)
        self.attributes = attributes
        self.engine_type_index = engine_type_index(self.definition)
        self.fields = fields_of(self._trt, self.definition, attributes)
        self.subject = subject
        self.problems = problems
        self.kernel = kernel
        self.plugin_name = self.definition.name
        self.plugin_version = VERSION
        self.plugin_namespace = NAMESPACE
        self.num_outputs = len(self.definition.outputs)
        self.format_combination_limit = 1
        self.metadata_string = ""
        self.timing_cache_id = ""

    def get_capability_interface(self, kind: Any) -> Any:
        """This object has the methods for building and for running."""
        return self

    def clone(self) -> Node:
        """A copy of the node that shares the kernel."""
        return type(self)(self.attributes, self.subject, self.problems, self.kernel)

    def attach_to_context(self, resources: Any) -> Node:
        """The node of an execution context. All contexts share the kernel."""
        return self.clone()


def make_node_class(trt: Any, definition: Plugin) -> type[Node]:
    """The class of this plugin's nodes for one of TensorRT's modules."""
    interfaces = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)
    members = {"_trt": trt, "definition": definition, "interfaces": interfaces, "__doc__": definition.doc}
    return type(definition.name, (Node, *interfaces), members)

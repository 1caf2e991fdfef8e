"""What TensorRT's run time asks of a plugin node: launches of its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..definition import Plugin
from ..kernel_node import KernelNode
from .element_types import dtype_of, engine_type_index
from .fields import fields_of
from .problems import Problems, reported


class RunHalf:
    """IPluginV3OneRuntime. Its names are TensorRT's."""

    _trt: Any
    definition: Plugin
    attributes: Mapping[str, Any]
    subject: str
    problems: Problems
    kernel: KernelNode | None

    def get_fields_to_serialize(self) -> Any:
        """The attributes, which is all that a plan keeps."""
        return fields_of(self._trt, self.definition, self.attributes)

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Sizes are read at each launch."""

    def set_tactic(self, tactic: int) -> None:
        """There is one."""

    @reported
    def enqueue(
        self,
        input_descriptions: Sequence[Any],
        output_descriptions: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Launches the kernel. Raises StepError when that fails."""
        assert self.kernel is not None  # the creator makes no node for the run time without one
        dtype = dtype_of(input_descriptions[engine_type_index(self.definition)].type)
        shapes = [description.dims for description in input_descriptions]
        self.kernel.enqueue(dtype, shapes, inputs, outputs, workspace, stream)

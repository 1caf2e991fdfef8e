"""What TensorRT's run time asks of a plugin node: launches of its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..definition import Plugin
from ..kernel_node import KernelNode
from .element_types import dtype_of
from .fields import Fields
from .problems import Problems, reported


class RunHalf:
    """IPluginV3OneRuntime. Its names are TensorRT's."""

    _trt: Any
    definition: Plugin
    attributes: Mapping[str, Any]
    subject: str
    problems: Problems
    kernel: KernelNode | None
    engine_type_index: int
    fields: Fields

    def get_fields_to_serialize(self) -> Any:
        """The attributes, which is all that a plan keeps."""
        return self.fields.collection

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
        # Of the descriptions only what is needed is read: this runs for each node of each step.
        dtype = dtype_of(input_descriptions[self.engine_type_index].type)
        sizes = [input_descriptions[index].dims[axis] for index, axis in self.kernel.size_places]
        self.kernel.launch(dtype, sizes, inputs, outputs, workspace, stream)

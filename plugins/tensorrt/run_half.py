"""Methods of a plugin node that TensorRT's runtime calls: they launch its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..definition import Plugin
from ..kernel_node import KernelNode
from .element_types import dtype_of
from .fields import Fields
from .problems import Problems, reported


class RunHalf:
    """IPluginV3OneRuntime. Method names are TensorRT's."""

    _trt: Any
    definition: Plugin
    attributes: Mapping[str, Any]
    subject: str
    problems: Problems
    kernel: KernelNode | None
    engine_type_index: int
    fields: Fields

    def get_fields_to_serialize(self) -> Any:
        """The attributes; a plan stores nothing else."""
        return self.fields.collection

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Does nothing: sizes are read at each launch."""

    def set_tactic(self, tactic: int) -> None:
        """Does nothing: there is only one tactic."""

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
        """Launches the kernel. Raises StepError if the launch fails."""
        assert self.kernel is not None  # The creator creates no runtime node without a kernel.
        # This runs for each node of each step, so it reads only the necessary descriptions.
        dtype = dtype_of(input_descriptions[self.engine_type_index].type)
        sizes = [input_descriptions[index].dims[axis] for index, axis in self.kernel.size_places]
        self.kernel.launch(dtype, sizes, inputs, outputs, workspace, stream)

"""Methods of a plugin node that TensorRT's builder calls. All of them follow from the definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..._core import EngineError
from ..definition import ENGINE_TYPE, Plugin
from ..sizes import bind_sizes, places_of
from .element_types import data_type, kernel_data_types
from .problems import Problems, reported


class BuildHalf:
    """IPluginV3OneBuildV2. Method names are TensorRT's."""

    _trt: Any
    definition: Plugin
    attributes: Mapping[str, Any]
    engine_type_index: int
    """Index of the first input of type T."""
    subject: str
    problems: Problems

    @reported
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        """T is the type of the first input that has type T."""
        engine_type = input_types[self.engine_type_index]
        return [
            engine_type if tensor.type == ENGINE_TYPE else data_type(self._trt, tensor.type)
            for tensor in self.definition.outputs
        ]

    @reported
    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
        """Each size is a constant, or equals the size of the input dimension with the same name.

        Raises EngineError that lists all mismatches. Shapes are checked here because the parser reports this exception;
        TensorRT for RTX 1.7 aborts the process after an exception in configure_plugin.
        """
        self._check_shapes(inputs)
        shapes = []
        for tensor in self.definition.outputs:
            shape = self._trt.DimsExprs(len(tensor.shape))
            for axis, name in enumerate(tensor.shape):
                if isinstance(name, int):
                    shape[axis] = builder.constant(name)
                else:
                    ((index, input_axis),) = places_of(self.definition, [name])
                    shape[axis] = inputs[index][input_axis]
            shapes.append(shape)
        return shapes

    def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
        """True for linear tensors of the definition's types, if the kernels support T."""
        tensor = (*self.definition.inputs, *self.definition.outputs)[position]
        found = tensors[position].desc
        if found.format != self._trt.TensorFormat.LINEAR:
            return False
        if tensor.type != ENGINE_TYPE:
            return bool(found.type == data_type(self._trt, tensor.type))
        first = self.engine_type_index
        if position > first:
            return bool(found.type == tensors[first].desc.type)
        return found.type in kernel_data_types(self._trt)

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Does nothing: there is nothing to configure."""

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """Size of the definition's workspace at the profile's maximum sizes."""
        sizes, _ = bind_sizes(self.definition, [tuple(tensor.max) for tensor in inputs])
        return self.definition.workspace_bytes(sizes, self.attributes)

    def get_aliased_input(self, output: int) -> int:
        """The input that an output overwrites; -1: none."""
        name = self.definition.aliases.get(self.definition.outputs[output].name)
        return -1 if name is None else [tensor.name for tensor in self.definition.inputs].index(name)

    def get_valid_tactics(self) -> list[int]:
        """Empty: there are no tactics to choose from."""
        return []

    def _check_shapes(self, inputs: Sequence[Any]) -> None:
        shapes = [[size.get_constant_value() if size.is_constant() else -1 for size in shape] for shape in inputs]
        sizes, problems = bind_sizes(self.definition, shapes)
        if not problems:
            problems = self.definition.check(sizes, self.attributes)
        if problems:
            raise EngineError(f"{self.subject}: " + "; ".join(problems))

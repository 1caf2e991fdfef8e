"""Quantises tensors while they are read, and measures the error."""

from __future__ import annotations

from collections.abc import Iterator

from ..._core import ConfigError
from ...formats.checkpoint.casting import Array, to_float32
from ...formats.checkpoint.quantization import QuantConfig
from ...formats.checkpoint.quantizer import QuantizationError, QuantizedRows, dequantize_rows, quantize_rows
from ...formats.checkpoint.rank_tensors import PlainTensors
from ...formats.checkpoint.tensor_names import LM_HEAD


class QuantizingTensors:
    """Tensors of a rank whose linear layers are quantised with `quantization`; None: nothing is quantised."""

    def __init__(
        self, source: PlainTensors, quantization: QuantConfig | None, *, lm_head_source: str = LM_HEAD
    ) -> None:
        """lm_head_source: name of the tensor of `source` with the weights of lm_head.

        Raises ConfigError for a quantisation to which weights cannot be rounded here.
        """
        if quantization is not None and not quantization.can_be_made:
            raise ConfigError(
                f"quantization is {quantization.describe()}, to which weights cannot be quantised here; "
                "accepted: integers of W8A16 and W8A8 without groups, and 4-bit integers of W4A16 and W4A8"
            )
        self._source = source
        self._quantization = quantization
        self._lm_head_source = lm_head_source
        self._errors: dict[str, QuantizationError] = {}

    @property
    def errors(self) -> tuple[QuantizationError, ...]:
        """Error of each weight over the rows that were read."""
        return tuple(self._errors.values())

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """Implements PlainTensors.rows."""
        return self._source.rows(name, rows, step)

    def quantized_rows(self, name: str, rows: range, step: int | None = None) -> Iterator[QuantizedRows]:
        """Implements RankTensors.quantized_rows."""
        assert self._quantization is not None
        how = self._quantization.of_weight(name)
        error = self._errors.setdefault(name, QuantizationError(name))
        for piece in self._source.rows(self._lm_head_source if name == LM_HEAD else name, rows, step):
            wide = to_float32(piece)
            quantized = quantize_rows(wide, how)
            error.add(wide, dequantize_rows(quantized, how))
            yield quantized

    def permutations(self, name: str) -> Array:
        """Raises ValueError: weights that are quantised here have no input permutation."""
        raise ValueError(f"weight '{name}' has no input permutation")

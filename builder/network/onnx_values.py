"""Values of a network in its ONNX graph."""

from __future__ import annotations

from .graph import Value

Values = dict[str, Value]
"""Values of the graph by the names of operands.Value."""

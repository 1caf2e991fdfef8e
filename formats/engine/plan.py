"""A program as the engine file holds it: adaptrt._core.Program, with tensors and buffers by name.

Its classes are made from the fields of their counterparts in adaptrt._core when the package is built
(cpp/bindings/stub/make_program.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, get_args

from ... import _program
from ..._program import *  # noqa: F403
from ..._program import Op
from .program_tensors import Quantization as Quantization


def _op_name(kind: type[Op]) -> str:
    """RmsNormOp is "rms_norm"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__.removesuffix("Op")).lower()


OP_NAMES: Final[dict[str, type[Op]]] = {_op_name(kind): kind for kind in get_args(Op)}
"""Names of ops in their field `op`."""


@dataclass(frozen=True, kw_only=True)
class Program(_program.Program):
    """A compiled network: ops in order, buffers in one arena, limits."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """Ops of all sections."""
        return (*self.encoder, *self.body, *self.head)

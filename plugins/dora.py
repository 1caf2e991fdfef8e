"""Dora: Lora, with each token's result multiplied by its adapter's normalised magnitudes."""

from __future__ import annotations

from functools import partial
from typing import Final

from .adapter_tables import MODULE_ATTRIBUTES, check_modules, shrink_bytes
from .definition import Plugin
from .lora import LINEAR_INPUTS, LINEAR_OUTPUT, evaluate_adapted

DORA: Final = Plugin(
    name="Dora",
    doc="y = (base + (x A^T) B^T) * magnitude. A, B and the magnitudes of the output features are those of the "
    "token's adapter for the part of the output; without magnitudes the factor is 1. The shrink's result x A^T "
    "is rounded to T. Sums and the product are float32 and rounded once.",
    inputs=LINEAR_INPUTS,
    outputs=(LINEAR_OUTPUT,),
    own_attributes=MODULE_ATTRIBUTES,
    check=check_modules,
    evaluate=partial(evaluate_adapted, magnitudes=True),
    aliases={},
    workspace_bytes=shrink_bytes,
)

"""Tables about quantisation that several commands print."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.table import Table

from ...formats.checkpoint.quantizer import QuantizationError
from ...formats.engine.engine_quality import EngineQuality

INT8_KV_CACHE_HELP: Final = (
    "store keys and values as int8, with one scale per token and head that is computed at run time"
)


def error_table(errors: Sequence[QuantizationError]) -> Table:
    """Table of ||W - quantised W|| / ||W|| for each kind of layer: mean and maximum over the layers."""
    kinds: dict[str, list[QuantizationError]] = {}
    for error in errors:
        kind = re.sub(r"transformer\.layers\.\d+\.", "", error.name).removesuffix(".weight")
        kinds.setdefault(kind, []).append(error)
    table = Table(title="relative error of quantised weights", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("layer", no_wrap=True)
    for column in ("mean", "max"):
        table.add_column(column, justify="right")
    table.add_column("worst")
    for kind, of_kind in kinds.items():
        worst = max(of_kind, key=lambda error: error.relative)
        mean = sum(error.relative for error in of_kind) / len(of_kind)
        table.add_row(kind, f"{mean:.3%}", f"{worst.relative:.3%}", worst.name.removesuffix(".weight"))
    return table


def quality_table(quality: EngineQuality, engine: str) -> Table:
    """Table of the quality of an engine made with `engine`, and of the reference engine."""
    read = f"the first {quality.tokens} tokens of {quality.text}, in windows of {quality.window}"
    table = Table(title=f"quality on {read}", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("engine")
    reference = quality.reference
    for column in ("perplexity", *(("change", "nats apart", "same choice") if reference is not None else ())):
        table.add_column(column, justify="right", no_wrap=True)
    measured = f"{quality.perplexity:.4f}"
    if reference is None:
        table.add_row(engine, measured)
        return table
    change = quality.perplexity / reference.perplexity - 1
    table.add_row(reference.engine, f"{reference.perplexity:.4f}")
    table.add_row(
        engine,
        measured,
        f"{change:+.2%}",
        f"{reference.divergence:.5f}",
        f"{reference.same_choices:.2%}",
    )
    return table

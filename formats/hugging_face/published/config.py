"""Reads quantization_config of Hugging Face models that were published quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ....common.json_fields import JsonFields, describe
from . import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from .formats import PublishedFormat

_READERS: Final[Mapping[str, Callable[[JsonFields], PublishedFormat | None]]] = {
    compressed_tensors.METHOD: compressed_tensors.read_compressed_tensors,
    bitsandbytes.METHOD: bitsandbytes.read_bitsandbytes,
    gptq.METHOD: gptq.read_gptq,
    awq.METHOD: awq.read_awq,
    fp8.METHOD: fp8.read_fp8,
    mxfp4.METHOD: mxfp4.read_mxfp4,
}


def read_published_format(config: Mapping[str, Any], problems: list[str]) -> PublishedFormat | None:
    """Returns the quantisation that a quantization_config describes.

    Adds problems to `problems`; then the result is None.
    """
    fields = JsonFields(config, prefix="quantization_config.", problems=problems)
    method = fields.raw("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        fields.problem(
            "quant_method",
            f"is {describe(method)}; accepted: {', '.join(_READERS)}. Convert the model that this one was quantised "
            "from",
        )
        return None
    noted = len(problems)
    found = reader(fields)
    if found is not None:
        fields.discard(name for name, value in fields.remaining().items() if value is None)
        fields.refuse_remaining()
    return found if len(problems) == noted else None

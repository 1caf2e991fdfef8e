"""quantization_config of Hugging Face models whose weights were quantised before they were published.

Read are the integer formats of compressed-tensors, which llm-compressor writes: "int-quantized" and "pack-quantized".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..._core import QuantAlgo
from ..checkpoint.quantization import GROUP_SIZES, QuantConfig
from ..json_fields import JsonFields, describe

_METHOD: Final = "compressed-tensors"
INT_QUANTIZED: Final = "int-quantized"
PACK_QUANTIZED: Final = "pack-quantized"
_FORMATS: Final = (INT_QUANTIZED, PACK_QUANTIZED)
# What calibration did, and what tools note down: the tensors are what they are.
_HARMLESS: Final = ("global_compression_ratio", "quantization_status", "version", "ignore")
_HARMLESS_ARGS: Final = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
# Features that are another computation, with their absence.
_ABSENT: Final = ("kv_cache_scheme", "sparsity_config", "transform_config")


def read_published_quantization(config: Mapping[str, Any], problems: list[str]) -> QuantConfig | None:
    """What a quantization_config says of the layers that are quantised; which these are, the tensors tell.

    Adds what cannot be served to `problems`; the result is None then.
    """
    fields = JsonFields(config, prefix="quantization_config.", problems=problems)
    method = fields.raw("quant_method")
    if method != _METHOD:
        fields.problem(
            "quant_method",
            f"is {describe(method)}; accepted: {_METHOD}. Convert the model that this one was quantised from",
        )
        return None
    noted = len(problems)
    file_format = fields.string("format", choices=_FORMATS)
    groups = fields.object("config_groups")
    fields.discard(_HARMLESS)
    for name in _ABSENT:
        if fields.raw(name) not in (None, {}):
            fields.problem(name, "is set, which is not supported")
    if groups is None:
        return None
    names = list(groups.remaining())
    group = groups.object(names[0]) if len(names) == 1 else None
    if group is None:
        fields.problem(
            "config_groups", f"has {len(names)} groups; layers that are quantised alike, one group, are read"
        )
        return None
    if group.strings("targets") != ("Linear",):
        group.problem("targets", "must be ['Linear']; other layers are not read")
    if group.raw("output_activations") is not None:
        group.problem("output_activations", "is set, but outputs are not quantised")
    own_format = group.optional_string("format")
    if own_format not in (None, file_format):
        group.problem("format", f"is '{own_format}', and that of the model '{file_format}'")
    weights, activations = group.object("weights"), group.object("input_activations", optional=True)
    if weights is None:
        return None
    found = _of_weights(weights, file_format)
    if activations is not None:
        found = _with_activations(activations, found)
    fields.refuse_remaining()
    return found if len(problems) == noted else None


def _of_weights(args: JsonFields, file_format: str) -> QuantConfig:
    bits = _integers(args, (4, 8))
    strategy = args.string("strategy", choices=("channel", "group"))
    group_size = args.raw("group_size")
    symmetric = args.boolean("symmetric", default=True)
    _refuse_dynamic(args, expected=False)
    if args.raw("actorder") not in (None, False, "static", "weight"):
        args.problem("actorder", "reorders inputs when the model runs, which is not supported; accepted: null, static")
    _finish(args)
    if bits == 8:
        if strategy != "channel" or not symmetric:
            args.problem("strategy", "of 8 bits must be channel, and symmetric")
        return QuantConfig(quant_algo=QuantAlgo.W8A16)
    if file_format != PACK_QUANTIZED:
        args.problem("num_bits", f"is {bits}, which {file_format} does not pack; accepted: 8")
    if strategy == "group" and group_size not in GROUP_SIZES:
        args.problem("group_size", f"is {describe(group_size)}; accepted: {', '.join(map(str, GROUP_SIZES))}")
        group_size = None
    return QuantConfig(
        quant_algo=QuantAlgo.W4A16,
        group_size=group_size if strategy == "group" else None,
        has_zero_point=not symmetric,
    )


def _with_activations(args: JsonFields, weights: QuantConfig) -> QuantConfig:
    """Of 8 bits with a scale for each token, made when the model runs."""
    _integers(args, (8,))
    if args.string("strategy", choices=("token", "tensor", "group")) != "token":
        args.problem("strategy", "must be token: one scale a token")
    if not args.boolean("symmetric", default=True):
        args.problem("symmetric", "must be true")
    args.discard(("group_size", "actorder"))
    _refuse_dynamic(args, expected=True)
    _finish(args)
    if weights.quant_algo is not QuantAlgo.W8A16:
        args.problem("num_bits", "goes with weights of 8 bits alone")
    return QuantConfig(quant_algo=QuantAlgo.W8A8)


def _integers(args: JsonFields, accepted: tuple[int, ...]) -> int:
    args.string("type", choices=("int",))
    bits = args.integer("num_bits", maximum=32)
    if bits not in accepted:
        args.problem("num_bits", f"is {bits}; accepted: {' or '.join(map(str, accepted))}")
    return bits


def _refuse_dynamic(args: JsonFields, *, expected: bool) -> None:
    dynamic = args.raw("dynamic")
    if dynamic is not expected:
        args.problem("dynamic", f"is {describe(dynamic)}; accepted: {str(expected).lower()}")


def _finish(args: JsonFields) -> None:
    args.discard(_HARMLESS_ARGS)
    if args.raw("block_structure") is not None:
        args.problem("block_structure", "is set, which is not supported")

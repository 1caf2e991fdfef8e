"""Quantisation of a checkpoint's weights, with TensorRT-LLM's names, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from ..._core import ConfigError, DType, QuantAlgo, WeightCode, dtype_from_name, dtype_name
from ...common.json_fields import JsonFields, describe
from ...common.safetensors_stream import TensorSpec
from .casting import FLOAT8, FLOAT32
from .tensor_names import LM_HEAD, LM_HEAD_MODULE

DEFAULT_GROUP_SIZE: Final = 128
GROUP_SIZES: Final = (32, 64, 128)
WEIGHT_ONLY_GROUP_SIZES: Final = (16, *GROUP_SIZES)
"""Group sizes of integers whose activations are not rounded."""
CODE_GROUP_SIZES: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Group sizes of codebook weights: the block sizes of bitsandbytes."""
FLOAT8_GROUPS: Final = 8
"""E4M3 group sizes must be multiples of this number of inputs."""
PACKED_INPUTS: Final = {2: 16, 3: 32, 4: 2}
"""Number of inputs packed together, by number of bits. Rows hold a whole number of such packs."""
INT8_KV_CACHE: Final = "INT8"
"""TensorRT-LLM's name, in kv_cache_quant_algo."""
QUANT_ALGOS: Final = tuple(algo.name for algo in QuantAlgo if algo is not QuantAlgo.NONE)

FEW_BITS: Final = (QuantAlgo.W4A16, QuantAlgo.W4A8)
"""Algorithms with weights of four bits or fewer."""

_WITH_INT8_ACTIVATIONS: Final = {
    QuantAlgo.W8A16: QuantAlgo.W8A8,
    QuantAlgo.W8A8: QuantAlgo.W8A8,
    QuantAlgo.W4A16: QuantAlgo.W4A8,
    QuantAlgo.W4A8: QuantAlgo.W4A8,
}
_WEIGHT: Final = ".weight"
_CHANNEL_SCALE: Final = "per_channel_scale"
_GROUP_SCALE: Final = "weights_scaling_factor"
_ZERO: Final = "zero"
_MINIMUM: Final = "minimum"
_PERMUTATION: Final = "input_order"


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Quantisation of a checkpoint's weights."""

    quant_algo: QuantAlgo
    group_size: int | None = None
    """Number of consecutive inputs of an output that share a scale; None: all inputs. Not for W8A8."""
    has_zero_point: bool = False
    """True if each group also has a zero point. Not for W8A8."""
    has_minimum: bool = False
    """True if each group also has a minimum: value = scale * u - minimum, both of scale_dtype. Only for integers of
    W4A16 and W8A16 in groups."""
    scale_dtype: DType = DType.BFLOAT16
    """Dtype of the scales if has_typed_scales."""
    bits: int = 4
    """Bits of W4A16 and W4A8 integers: 2, 3 or 4. Checkpoints store four bits, engines this number."""
    code: WeightCode = WeightCode.INTEGER
    """Meaning of a weight's bits."""
    value_dtype: DType | None = None
    """For codebook weights and E4M3: dtype of number * scale, rounded once; None for integers."""
    act_order: bool = False
    """True if a weight's inputs are permuted (GPTQ's act-order); a tensor holds the permutation.

    Only for integers of W4A16 and W8A16.
    """
    exclude_modules: tuple[str, ...] = ()
    """Names of linear layers that are not quantised, such as lm_head."""
    quantized_layers: tuple[tuple[str, QuantConfig], ...] = ()
    """Names of linear layers that are quantised in another way, with their own quantisation."""

    def problems(self) -> list[str]:
        """Lists everything that is not accepted."""
        found = []
        weight_only = self.quant_algo in (QuantAlgo.W4A16, QuantAlgo.W8A16)
        accepted = CODE_GROUP_SIZES if self.is_codebook else WEIGHT_ONLY_GROUP_SIZES if weight_only else GROUP_SIZES
        if self.group_size is not None and self.is_float8:
            if self.group_size < 1 or self.group_size % FLOAT8_GROUPS != 0:
                found.append(f"group_size is {self.group_size}; accepted: multiples of {FLOAT8_GROUPS}")
        elif self.group_size is not None and self.group_size not in accepted:
            found.append(f"group_size is {self.group_size}; accepted: {', '.join(map(str, accepted))}")
        if self.has_minimum and (self.is_codebook or self.has_zero_point or not weight_only or self.group_size is None):
            found.append("has_minimum is given; only integers of W4A16 and W8A16 in groups without zero points have it")
        if self.is_codebook:
            if self.group_size is None and not self.is_of_eight_bits:
                found.append(f"group_size is missing; {self.code.name} needs it")
            if self.value_dtype is None:
                found.append(f"value_dtype is missing; {self.code.name} needs it")
            if self.has_zero_point:
                found.append(f"has_zero_point is given, but {self.code.name} has none")
            if self.act_order:
                found.append(f"reordered is given, but {self.code.name} cannot have permuted inputs")
            if self.is_llm_int8 and self.group_size is not None:
                found.append(f"group_size is given, but {self.code.name} has one scale per output")
            if self.is_llm_int8 and self.scale_dtype is not DType.FLOAT32:
                found.append(f"scale_dtype is {dtype_name(self.scale_dtype)}; {self.code.name} has float32")
        elif self.value_dtype is not None:
            found.append("value_dtype is given, but values of integers are not rounded")
        if self.bits not in PACKED_INPUTS:
            found.append(f"bits is {self.bits}; accepted: {', '.join(map(str, PACKED_INPUTS))}")
        elif self.bits != 4 and (self.is_codebook or not self.has_few_bits):
            found.append(f"bits is {self.bits}; expected 4, except for integers of W4A16 and W4A8")
        elif self.bits != 4 and self.group_size is not None and self.group_size % PACKED_INPUTS[self.bits] != 0:
            found.append(
                f"group_size is {self.group_size}; accepted with {self.bits} bits: multiples of "
                f"{PACKED_INPUTS[self.bits]}"
            )
        if self.is_of_eight_bits:
            if self.quant_algo is not QuantAlgo.W8A16:
                found.append(f"code is {self.code.name} with {self.quant_algo.name}; accepted: W8A16")
        elif self.quant_algo is QuantAlgo.W4A8:
            if self.is_codebook:
                found.append(f"code is {self.code.name} with W4A8; accepted: W4A16")
            if self.act_order:
                found.append("reordered is given, but W4A8 cannot have permuted inputs")
        elif self.quant_algo is not QuantAlgo.W4A16:
            if self.group_size is not None and self.quant_algo is not QuantAlgo.W8A16:
                found.append(f"group_size is given, but {self.quant_algo.name} has one scale per output")
            if self.has_zero_point and self.quant_algo is not QuantAlgo.W8A16:
                found.append(f"has_zero_point is given, but {self.quant_algo.name} is symmetric")
            if self.act_order and self.quant_algo is not QuantAlgo.W8A16:
                found.append(f"reordered is given, but {self.quant_algo.name} cannot have permuted inputs")
            if self.scale_dtype is not DType.BFLOAT16 and not self.has_typed_scales:
                found.append(f"scale_dtype is given, but the scales of {self.quant_algo.name} are float32")
            if self.is_codebook:
                found.append(f"code is given, but {self.quant_algo.name} has integers")
        for name, how in self.quantized_layers:
            found += [f"quantized_layers has {name}, whose {problem}" for problem in how.problems()]
        return found

    @property
    def has_few_bits(self) -> bool:
        """True if weights have four bits or fewer."""
        return self.quant_algo in FEW_BITS

    @property
    def is_codebook(self) -> bool:
        """True if the bits are codes, not plain integers: entries of a codebook, FP8 or LLM.int8() numbers.

        Their products with scales are rounded to value_dtype.
        """
        return self.code is not WeightCode.INTEGER

    @property
    def is_float8(self) -> bool:
        """True if the weights are FP8 numbers."""
        return self.code is WeightCode.E4M3

    @property
    def is_llm_int8(self) -> bool:
        """True if the weights are integers with the values of bitsandbytes' LLM.int8()."""
        return self.code is WeightCode.LLM_INT8

    @property
    def is_of_eight_bits(self) -> bool:
        """True if the weights are codes of eight bits."""
        return self.is_float8 or self.is_llm_int8

    @property
    def has_typed_scales(self) -> bool:
        """True if scales have groups or a dtype of their own; otherwise there is one float32 scale per output."""
        return self.has_few_bits or self.is_of_eight_bits or self.group_size is not None

    @property
    def can_be_made(self) -> bool:
        """True if AdaptRT can quantise weights this way; other formats only come from published models."""
        is_published_int8 = not self.has_few_bits and (self.group_size is not None or self.has_zero_point)
        is_of_checkpoint = (
            is_published_int8 or self.has_minimum or self.is_codebook or self.act_order or bool(self.quantized_layers)
        )
        return self.bits == 4 and not is_of_checkpoint

    @property
    def packed_inputs(self) -> int:
        """Number of inputs of an output that are packed together; rows hold a whole number of such packs."""
        if self.has_few_bits:
            return PACKED_INPUTS[self.bits]
        return 2 if self.is_of_eight_bits else 1

    def shape_problems(self, weights: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Lists reasons why weights of these names and shapes cannot be quantised this way."""
        problems = ((name, shape[1], self.of_weight(name)._input_problem(shape[1])) for name, shape in weights.items())
        return [f"tensor '{name}' has {inputs} inputs; {problem}" for name, inputs, problem in problems if problem]

    def _input_problem(self, inputs: int) -> str | None:
        """Says which numbers of inputs can be quantised this way; None if `inputs` can be."""
        if self.is_of_eight_bits:
            return f"{self.code.name} needs an even number" if inputs % 2 != 0 else None
        if not self.has_few_bits:
            return None
        if self.is_codebook:
            assert self.group_size is not None
            expected = f"expected a multiple of the group size {self.group_size}"
            return expected if inputs % self.group_size != 0 else None
        return self._describe_packing() if inputs % PACKED_INPUTS[self.bits] != 0 else None

    def _describe_packing(self) -> str:
        if self.bits == 4:
            return f"{self.quant_algo.name} packs two in a byte, so there must be an even number"
        what, together = f"{self.quant_algo.name} of {self.bits} bits", PACKED_INPUTS[self.bits]
        return f"{what} packs {together} together, so there must be a multiple of {together}"

    def with_int8_activations(self) -> QuantConfig:
        """Returns the same weights, for activations that are rounded to int8.

        Raises ConfigError if the weights do not support it.
        """
        if self.quant_algo in _WITH_INT8_ACTIVATIONS:
            layers = tuple(
                (name, how if name == LM_HEAD_MODULE else how.with_int8_activations())
                for name, how in self.quantized_layers
            )
            config = replace(self, quant_algo=_WITH_INT8_ACTIVATIONS[self.quant_algo], quantized_layers=layers)
            if not config.problems():
                return config
        raise ConfigError(
            f"int8_activations: the weights are {self.describe()}; accepted: integers of W4A16 "
            "whose inputs are not permuted, and of W8A16 with one scale per output and no zero points"
        )

    def of_weight(self, name: str) -> QuantConfig:
        """Quantisation of a quantised linear layer's weight: its own; otherwise int8 for lm_head, and this one for
        others."""
        own = self._own.get(name.removesuffix(_WEIGHT))
        if own is not None:
            return own
        return QuantConfig(quant_algo=QuantAlgo.W8A16) if name == LM_HEAD else self

    def rounds_activations_of(self, name: str) -> bool:
        """True if activations that are multiplied with a weight of eight bits become int8."""
        return self._own.get(name.removesuffix(_WEIGHT), self).quant_algo is QuantAlgo.W8A8

    @cached_property
    def _own(self) -> Mapping[str, QuantConfig]:
        return dict(self.quantized_layers)

    @property
    def layer_algos(self) -> frozenset[QuantAlgo]:
        """Algorithms of the quantised layers, except lm_head's."""
        others = (how.quant_algo for name, how in self.quantized_layers if name != LM_HEAD_MODULE)
        return frozenset((self.quant_algo, *others))

    @property
    def has_codebooks(self) -> bool:
        """True if any layer is_codebook."""
        return self.is_codebook or any(how.is_codebook for _, how in self.quantized_layers)

    def scales_of(self, name: str) -> str:
        """Name of the tensor with a quantised weight's scales. Call it on of_weight() of that weight."""
        return f"{name.removesuffix(_WEIGHT)}.{_CHANNEL_SCALE if self.group_size is None else _GROUP_SCALE}"

    def zeros_of(self, name: str) -> str:
        """Name of the tensor with the zero points, if there are any."""
        return f"{name.removesuffix(_WEIGHT)}.{_ZERO}"

    def minimums_of(self, name: str) -> str:
        """Name of the tensor with the minimums, if there are any."""
        return f"{name.removesuffix(_WEIGHT)}.{_MINIMUM}"

    def permutation_name(self, name: str) -> str:
        """Name of the tensor with the permutations, if the inputs are permuted: input i of a part is order[part, i]."""
        return f"{name.removesuffix(_WEIGHT)}.{_PERMUTATION}"

    def groups(self, inputs: int) -> int:
        """Number of scales per output."""
        return 1 if self.group_size is None else -(-inputs // self.group_size)

    def describe(self) -> str:
        """Text for people: W4A16 in groups of 64 with zero points."""
        code = f" of {self.code.name}" if self.is_codebook else ""
        group = f" in groups of {self.group_size}" if self.group_size is not None else ""
        zeros = " with zero points" if self.has_zero_point else " with minimums" if self.has_minimum else ""
        bits = "" if self.bits == 4 else f" of {self.bits} bits"
        act_order = ", reordered" if self.act_order else ""
        own = f"{self.quant_algo.name}{bits}{code}{group}{zeros}{act_order}"
        return f"{own}{self._describe_excluded()}{self._describe_layers(own)}"

    def _describe_layers(self, common: str) -> str:
        names: dict[str, list[str]] = {}
        for name, how in self.quantized_layers:
            if (text := how.describe()) != common:
                names.setdefault(text, []).append(name)
        return "".join(f"; {own[0] if len(own) == 1 else f'{len(own)} layers'} {how}" for how, own in names.items())

    def _describe_excluded(self) -> str:
        count = len(self.exclude_modules)
        if count == 0:
            return ""
        return f", but for {self.exclude_modules[0] if count == 1 else f'{count} of them'}"

    def to_dict(self) -> dict[str, Any]:
        """Fields of the weights in config.json's `quantization`."""
        own: dict[str, Any] = {}
        if self.has_typed_scales:
            own["scale_dtype"] = dtype_name(self.scale_dtype)
        if self.has_minimum:
            own["has_minimum"] = True
        if self.bits != 4:
            own["bits"] = self.bits
        if self.is_codebook and self.value_dtype is not None:
            own |= {"code": self.code.name, "value_dtype": dtype_name(self.value_dtype)}
        if self.act_order:
            own["reordered"] = True
        return {
            "quant_algo": self.quant_algo.name,
            "group_size": self.group_size,
            "has_zero_point": self.has_zero_point,
            **own,
            "exclude_modules": list(self.exclude_modules),
            **({"quantized_layers": self._layers_to_dict()} if self.quantized_layers else {}),
        }

    def _layers_to_dict(self) -> dict[str, Any]:
        fields = {name: how.to_dict() for name, how in self.quantized_layers}
        for each in fields.values():
            del each["exclude_modules"]
        return fields


def quantization_to_dict(weights: QuantConfig | None, *, int8_kv_cache: bool) -> dict[str, Any]:
    """Content of config.json's `quantization`; `weights` None: not quantised."""
    return {
        "quant_algo": None,
        "kv_cache_quant_algo": INT8_KV_CACHE if int8_kv_cache else None,
        **(weights.to_dict() if weights is not None else {}),
    }


def read_int8_kv_cache(source: JsonFields) -> bool:
    """Reads the KV cache's field of a `quantization` object; True if the cache is int8."""
    algo = source.raw("kv_cache_quant_algo")
    if algo not in (None, INT8_KV_CACHE):
        source.problem("kv_cache_quant_algo", f"is {describe(algo)}; accepted: null, {INT8_KV_CACHE}")
    return bool(algo == INT8_KV_CACHE)


def read_quantization(source: JsonFields) -> QuantConfig | None:
    """Reads the weights' fields of a `quantization` object; None if they are not quantised."""
    layers = _read_layers(source)
    algo = source.raw("quant_algo")
    group_size = source.optional_integer("group_size")
    has_zero_point = source.boolean("has_zero_point", default=False)
    excluded = source.strings("exclude_modules") if "exclude_modules" in source else ()
    # Older checkpoints lack these fields.
    has_minimum = source.boolean("has_minimum", default=False)
    scale_dtype = _optional_dtype(source, "scale_dtype")
    value_dtype = _optional_dtype(source, "value_dtype")
    bits = source.integer("bits") if "bits" in source else 4
    code = source.raw("code") if "code" in source else WeightCode.INTEGER.name
    act_order = source.boolean("reordered", default=False)
    if algo is None:
        return None
    if not isinstance(algo, str) or algo not in QUANT_ALGOS:
        source.problem("quant_algo", f"is {describe(algo)}; accepted: null, {', '.join(QUANT_ALGOS)}")
        return None
    if not isinstance(code, str) or code not in WeightCode.__members__:
        source.problem("code", f"is {describe(code)}; accepted: {', '.join(WeightCode.__members__)}")
        return None
    config = QuantConfig(
        quant_algo=QuantAlgo[algo],
        group_size=group_size,
        has_zero_point=has_zero_point,
        has_minimum=has_minimum,
        scale_dtype=DType.BFLOAT16 if scale_dtype is None else scale_dtype,
        bits=bits,
        code=WeightCode[code],
        value_dtype=value_dtype,
        act_order=act_order,
        exclude_modules=excluded,
        quantized_layers=layers,
    )
    for problem in config.problems():
        name, _, complaint = problem.partition(" ")
        source.problem(name, complaint)
    return config


def _read_layers(source: JsonFields) -> tuple[tuple[str, QuantConfig], ...]:
    """Reads QuantConfig.quantized_layers: an object of objects, by the names of the layers."""
    layers = source.object("quantized_layers", optional=True)
    found = []
    for name in () if layers is None else list(layers.remaining()):
        assert layers is not None
        fields = layers.object(name)
        if fields is None:
            continue
        for nested in ("exclude_modules", "quantized_layers"):
            if fields.raw(nested) is not None:
                fields.problem(nested, "is given for one layer; it belongs to the whole checkpoint")
        how = read_quantization(fields)
        if how is not None:
            found.append((name, how))
        elif not fields.problems:
            layers.problem(name, "has no quant_algo")
    return tuple(found)


def _optional_dtype(source: JsonFields, name: str) -> DType | None:
    text = source.raw(name) if name in source else None
    if text is None:
        return None
    try:
        return dtype_from_name(text if isinstance(text, str) else describe(text))
    except ConfigError as error:
        source.problem(name, f"cannot be used: {error}")
        return None


def quantized_specs(name: str, shape: tuple[int, int], how: QuantConfig, num_parts: int = 1) -> list[TensorSpec]:
    """Specs of the tensors in a rank's file for a quantised weight.

    These are its integers, scales, zero points or minimums and, if the inputs are permuted, the permutation of each
    part.
    """
    outputs, inputs = shape
    groups = (outputs,) if how.group_size is None else (outputs, how.groups(inputs))
    others = [TensorSpec(how.permutation_name(name), np.dtype(np.int32), (num_parts, inputs))] if how.act_order else []
    if how.has_minimum:
        others.insert(0, TensorSpec(how.minimums_of(name), np.dtype(dtype_name(how.scale_dtype)), groups))
    if how.is_float8:
        scales = TensorSpec(how.scales_of(name), np.dtype(dtype_name(how.scale_dtype)), groups)
        return [TensorSpec(name, FLOAT8, shape), scales]
    if not how.has_few_bits:
        scale_dtype = np.dtype(dtype_name(how.scale_dtype)) if how.has_typed_scales else FLOAT32
        integers = [TensorSpec(name, np.dtype(np.int8), shape), TensorSpec(how.scales_of(name), scale_dtype, groups)]
        zeros = [TensorSpec(how.zeros_of(name), np.dtype(np.int8), groups)] if how.has_zero_point else []
        return [*integers, *zeros, *others]
    specs = [
        TensorSpec(name, np.dtype(np.uint8), (outputs, inputs // 2)),
        TensorSpec(how.scales_of(name), np.dtype(dtype_name(how.scale_dtype)), groups),
    ]
    if how.has_zero_point:
        specs.append(TensorSpec(how.zeros_of(name), np.dtype(np.uint8), groups))
    return [*specs, *others]

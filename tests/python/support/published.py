"""Models in the formats of published quantised weights, written by the formulas of those formats.

Each writer chooses integers and scales, computes the weights that they represent, and packs them. A reader of the files
must find the same weights, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

Array = np.ndarray
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
NF4 = (
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 "
    "-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 "
    "0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"
)
# bitsandbytes' table of FP4, with its own rounding.
FP4 = (
    "0.0 0.005208333488553762 0.6666666865348816 1.0 0.3333333432674408 0.5 0.1666666716337204 0.25 "
    "0.0 -0.005208333488553762 -0.6666666865348816 -1.0 -0.3333333432674408 -0.5 -0.1666666716337204 -0.25"
)
CODES = {"nf4": np.array(NF4.split(), np.float32), "fp4": np.array(FP4.split(), np.float32)}


@dataclass
class Layer:
    """A published linear layer."""

    tensors: dict[str, Array]
    """Tensors by the end of their names, such as .qweight."""
    values: Array
    """[out, in]: weights as the format's library dequantises them."""
    exact: Array | None = None
    """Weights of an engine that keeps the integers, which does not round products of integers and scales."""


@dataclass(frozen=True)
class Scheme:
    """A format with its settings."""

    config: dict[str, Any]
    """quantization_config."""
    quantize: Callable[[Array, np.random.Generator], Layer]
    """Quantises a matrix [out, in]."""
    dtype: np.dtype[Any] | None
    """Type that the library dequantises to; None: the type in which the model is loaded, from float32."""
    fills_words: int = 1
    """Outputs and inputs must be multiples of this."""
    group_size: int = 1
    """Inputs must be a multiple of this."""


def in_words(numbers: Array, bits: int) -> Array:
    """Packs numbers [n, m] to int32 [n * bits / 32, m], the first number in the lowest bits."""
    count = -(-len(numbers) * bits // 32)
    words = np.zeros((count + 1, numbers.shape[1]), np.uint64)
    for at, row in enumerate(numbers):
        word, shift = divmod(at * bits, 32)
        shifted = row.astype(np.uint64) << np.uint64(shift)
        words[word] |= shifted & np.uint64(0xFFFFFFFF)
        words[word + 1] |= shifted >> np.uint64(32)
    return words[:count].astype(np.uint32).view(np.int32)


def json_bytes(value: Mapping[str, Any]) -> Array:
    """Returns a uint8 tensor with JSON, as bitsandbytes stores values that are not tensors."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def bits4(kind: str, dtype: str, *, nested: bool, block_size: int = 64, storage: str = "uint8") -> Scheme:
    """Returns NF4 or FP4 of bitsandbytes."""
    target = np.dtype(dtype)

    def quantize(matrix: Array, rng: np.random.Generator) -> Layer:
        flat = matrix.reshape(-1).astype(np.float32)
        blocks = -(-flat.size // block_size)
        padded = np.pad(flat, (0, blocks * block_size - flat.size)).reshape(blocks, block_size)
        scales = np.abs(padded).max(axis=1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block_size, "dtype": dtype, "shape": matrix.shape}
        tensors = {}
        if nested:
            offset = scales.mean(dtype=np.float32)
            table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            outer = -(-blocks // 256)
            remainders = np.pad(scales - offset, (0, outer * 256 - blocks)).reshape(outer, 256)
            nested_scales = np.abs(remainders).max(axis=1) + np.float32(1e-3)
            numbers = np.abs((remainders / nested_scales[:, None])[:, :, None] - table).argmin(axis=2).astype(np.uint8)
            scales = ((table[numbers] * nested_scales[:, None]).reshape(-1)[:blocks] + offset).astype(np.float32)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
            tensors[".weight.absmax"] = numbers.reshape(-1)[:blocks]
            tensors[".weight.nested_absmax"] = nested_scales
            tensors[".weight.nested_quant_map"] = table
        else:
            tensors[".weight.absmax"] = scales
        code = CODES[kind]
        safe = np.where(scales == 0, 1, scales)[:, None]
        numbers = np.abs((padded / safe)[:, :, None] - code).argmin(axis=2).astype(np.uint8)
        values = (code[numbers] * scales[:, None]).reshape(-1)[: flat.size].reshape(matrix.shape).astype(target)
        numbers = numbers.reshape(-1)[: flat.size]
        numbers = np.pad(numbers, (0, numbers.size % 2))
        packed = (numbers[0::2] << 4 | numbers[1::2]).view(np.dtype(storage)).reshape(-1, 1)
        tensors |= {".weight": packed, ".weight.quant_map": code.copy()}
        tensors[f".weight.quant_state.bitsandbytes__{kind}"] = json_bytes(state)
        return Layer(tensors, values, values)

    config = {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": storage,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
    }
    return Scheme(config, quantize, target, fills_words=1 if storage == "uint8" else 4)


def bits8() -> Scheme:
    """Returns LLM.int8() of bitsandbytes."""

    def quantize(matrix: Array, rng: np.random.Generator) -> Layer:
        scales = np.abs(matrix).max(axis=1).astype(np.float32) + np.float32(1e-6)
        numbers = np.rint(matrix / scales[:, None] * 127).clip(-127, 127).astype(np.int8)
        values = numbers.astype(np.float32) * scales[:, None] * np.float32(7.874015718698502e-3)
        tensors = {".weight": numbers, ".SCB": scales, ".weight_format": np.array(0, np.uint8)}
        return Layer(tensors, values, values)

    config = {**bits4("nf4", "float16", nested=False).config, "load_in_4bit": False, "load_in_8bit": True}
    config |= {"_load_in_4bit": False, "_load_in_8bit": True}
    return Scheme(config, quantize, None)


@dataclass
class Groups:
    """Integers, scales and zero points by output and group of inputs."""

    numbers: Array
    scales: Array
    zeros: Array

    def of(self, groups: Array, dtype: np.dtype[Any]) -> Array:
        """Returns the weights. groups: group of each input."""
        exact = (self.numbers.astype(np.float64) - self.zeros[:, groups]) * self.scales.astype(np.float64)[:, groups]
        return exact.astype(np.float32).astype(dtype)


def in_groups(
    matrix: Array, groups: Array, bits: int, dtype: np.dtype[Any], rng: np.random.Generator, *, symmetric: bool
) -> Groups:
    """Quantises a matrix to integers from 0 to 2^bits - 1, with zero points in the same range."""
    count, greatest = int(groups.max()) + 1, 2**bits - 1
    spread = np.stack([np.abs(matrix[:, groups == group]).max(axis=1) for group in range(count)], axis=1)
    scales = (spread / (greatest / 2) + 1e-4).astype(np.float32).astype(dtype)
    zeros = np.full(scales.shape, 2 ** (bits - 1))
    if not symmetric:
        zeros = rng.integers(0, greatest + 1, scales.shape)
    numbers = np.rint(matrix / scales.astype(np.float32)[:, groups]) + zeros[:, groups]
    return Groups(numbers.clip(0, greatest).astype(np.uint8), scales, zeros)


def gptq(
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    uneven: bool = False,
    layout: str = "gptq",
    dtype: np.dtype[Any] = FLOAT16,
    quantizer: str = "gptqmodel:5.0.0",
) -> Scheme:
    """Returns GPTQ. act_order: groups follow the importance of inputs, not their position (desc_act).

    uneven: the first group has one input too many, and the second one too few.
    """

    def quantize(matrix: Array, rng: np.random.Generator) -> Layer:
        inputs = matrix.shape[1]
        groups = np.arange(inputs) // (group_size if group_size > 0 else inputs)
        if act_order:
            groups = rng.permutation(groups)
        if uneven:
            groups[np.argmax(groups == 1)] = 0
        made = in_groups(matrix, groups, bits, dtype, rng, symmetric=symmetric)
        # [groups, out]; words of the zero points run along the outputs.
        zeros = in_words(made.zeros, bits).T
        if layout == "gptq":
            zeros = less_one(made.zeros, bits)
        tensors = {
            ".qweight": in_words(made.numbers.T, bits),
            ".qzeros": np.ascontiguousarray(zeros),
            ".scales": np.ascontiguousarray(made.scales.T),
            ".g_idx": groups.astype(np.int32),
        }
        return Layer(tensors, made.of(groups, dtype), made.of(groups, FLOAT32))

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": act_order,
        "checkpoint_format": layout,
        "damp_percent": 0.01,
        "true_sequential": True,
        "lm_head": False,
        "pack_dtype": "int32",
        "meta": {"quantizer": [quantizer]},
    }
    return Scheme(config, quantize, dtype, fills_words=32)


def less_one(zeros: Array, bits: int) -> Array:
    """Returns int32 [groups, words] of zero points [out, groups] as GPTQModel writes them: minus one.

    It subtracts one from whole words of 2, 4 and 8 bits, so a zero borrows from its neighbour.
    """
    if bits == 3:
        return in_words((zeros - 1) & 7, 3).T
    ones = sum(1 << place for place in range(0, 32, bits))
    words = in_words(zeros, bits).T.astype(np.int64) - ones
    return (words & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def awq(group_size: int, layout: str = "gemm", dtype: np.dtype[Any] = FLOAT16) -> Scheme:
    """Returns AWQ."""

    def quantize(matrix: Array, rng: np.random.Generator) -> Layer:
        outputs, inputs = matrix.shape
        size = group_size if group_size > 0 else inputs
        groups = np.arange(inputs) // size
        made = in_groups(matrix, groups, 4, dtype, rng, symmetric=False)
        if layout == "gemm":
            order = np.arange(outputs).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
            tensors = {
                ".qweight": in_words(made.numbers[order], 4).T,
                ".qzeros": in_words(made.zeros[order], 4).T,
                ".scales": made.scales.T,
            }
        else:
            at_once = {32: 4, 64: 2}.get(size, 1)
            words = -(-made.zeros.shape[1] // (8 * at_once)) * at_once
            room = ((0, 0), (0, 8 * words - made.zeros.shape[1]))
            tensors = {
                ".qweight": in_words(made.numbers.T, 4).T,
                ".qzeros": in_words(np.pad(made.zeros, room).T, 4).T,
                ".scales": np.pad(made.scales, room),
            }
        contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        return Layer(contiguous, made.of(groups, dtype), made.of(groups, FLOAT32))

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": layout,
        "modules_to_not_convert": None,
    }
    return Scheme(config, quantize, dtype, fills_words=8, group_size=max(group_size, 1))


def _blocks(matrix: Array, block: tuple[int, int], dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """Returns a matrix in FP8, the scales of its blocks, and each number's scale, float32."""
    rows, columns = (np.arange(size) // step for size, step in zip(matrix.shape, block, strict=True))
    scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
    np.maximum.at(scales, (rows[:, None], columns[None, :]), np.abs(matrix))
    scales = (scales / 448 + np.float32(1e-6)).astype(dtype)
    each = scales.astype(np.float32)[rows][:, columns]
    return (matrix / each).clip(-448, 448).astype(FLOAT8), scales, each


def fp8(block: tuple[int, int], scale_dtype: np.dtype[Any]) -> Scheme:
    """Returns FP8 in blocks, as in DeepSeek's and Qwen's models."""

    def quantize(matrix: Array, rng: np.random.Generator) -> Layer:
        numbers, scales, each = _blocks(matrix, block, scale_dtype)
        values = numbers.astype(np.float32) * each
        return Layer({".weight": numbers, ".weight_scale_inv": scales}, values, values)

    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head"],
    }
    return Scheme(config, quantize, None)


def compressed_tensors_config(
    file_format: str, weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns the quantization_config of a compressed-tensors model."""
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
            }
        },
    }


def float8(strategy: str, dtype: np.dtype[Any] = BFLOAT16, *, static: bool = False) -> Scheme:
    """Returns FP8 of compressed-tensors."""

    def quantize(matrix: Array, rng: np.random.Generator) -> Layer:
        block = {"tensor": matrix.shape, "channel": (1, matrix.shape[1]), "block": (32, 16)}[strategy]
        numbers, scales, each = _blocks(matrix, block, dtype)
        tensors = {".weight": numbers, ".weight_scale": scales.reshape(-1) if strategy == "tensor" else scales}
        if static:
            tensors[".input_scale"] = np.ones(1, dtype)
        values = (numbers.astype(np.float32) * each).astype(dtype)
        return Layer(tensors, values, values)

    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [32, 16]
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor" if static else "token", "symmetric": True}
    config = compressed_tensors_config("float-quantized", weights, {**activations, "dynamic": not static})
    return Scheme(config, quantize, np.dtype(dtype))


def integers(
    bits: int,
    group_size: int | None,
    dtype: np.dtype[Any] = FLOAT16,
    *,
    symmetric: bool = True,
    act_order: bool = False,
) -> Scheme:
    """Returns packed integers of compressed-tensors."""

    def quantize(matrix: Array, rng: np.random.Generator) -> Layer:
        groups = np.arange(matrix.shape[1]) // (group_size or matrix.shape[1])
        if act_order:
            groups = rng.permutation(groups)
        made = in_groups(matrix, groups, bits, dtype, rng, symmetric=symmetric)
        tensors = {
            ".weight_packed": np.ascontiguousarray(in_words(made.numbers.T, bits).T),
            ".weight_scale": made.scales,
            ".weight_shape": np.array(matrix.shape, np.int64),
        }
        if not symmetric:
            tensors[".weight_zero_point"] = in_words(made.zeros, bits)
        if act_order:
            tensors[".weight_g_idx"] = groups.astype(np.int32)
        return Layer(tensors, made.of(groups, dtype), made.of(groups, FLOAT32))

    strategy = "channel" if group_size is None else "group"
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size, "dynamic": False}
    if act_order:
        weights["actorder"] = "group"
    config = compressed_tensors_config("pack-quantized", {**weights, "symmetric": symmetric}, None)
    return Scheme(config, quantize, np.dtype(dtype), group_size=group_size or 1)


SCHEMES: dict[str, Scheme] = {
    "nf4": bits4("nf4", "bfloat16", nested=False),
    "nf4-double": bits4("nf4", "bfloat16", nested=True),
    "nf4-double-float16": bits4("nf4", "float16", nested=True, block_size=128),
    "nf4-stored-as-bfloat16": bits4("nf4", "bfloat16", nested=True, storage="bfloat16"),
    "fp4": bits4("fp4", "float32", nested=False),
    "fp4-double": bits4("fp4", "bfloat16", nested=True),
    "llm-int8": bits8(),
    "gptq-2": gptq(2, 64),
    "gptq-3": gptq(3, 32),
    "gptq-3-asymmetric": gptq(3, -1, symmetric=False),
    "gptq-4": gptq(4, 32),
    "gptq-4-no-groups": gptq(4, -1),
    "gptq-4-asymmetric": gptq(4, 64, symmetric=False),
    "gptq-4-act-order": gptq(4, 32, act_order=True),
    "gptq-4-uneven": gptq(4, 32, uneven=True),
    "gptq-2-act-order": gptq(2, 64, act_order=True, symmetric=False),
    "gptq-3-act-order": gptq(3, 32, act_order=True),
    "gptq-4-act-order-asymmetric": gptq(4, 32, act_order=True, symmetric=False, layout="gptq_v2", quantizer="other"),
    "gptq-4-v2": gptq(4, 32, symmetric=False, layout="gptq_v2", quantizer="other"),
    "gptq-8": gptq(8, 32, symmetric=False, layout="gptq_v2"),
    "gptq-8-groups": gptq(8, 64),
    "gptq-8-act-order": gptq(8, 32, act_order=True, dtype=BFLOAT16),
    "awq-gemm": awq(32),
    "awq-gemm-no-groups": awq(-1),
    "awq-gemv": awq(32, "gemv"),
    "awq-gemv-no-groups": awq(-1, "gemv"),
    "fp8-blocks": fp8((16, 32), np.dtype(np.float32)),
    "fp8-blocks-bfloat16": fp8((128, 128), BFLOAT16),
    "float8-tensor": float8("tensor", static=True),
    "float8-channel": float8("channel", FLOAT16),
    "float8-channel-float32": float8("channel", np.dtype(np.float32)),
    "float8-block": float8("block"),
    "packed-4-float16": integers(4, 32),
    "packed-4-groups-of-16": integers(4, 16, BFLOAT16, symmetric=False),
    "packed-8-groups": integers(8, 32, symmetric=False),
    "packed-8-symmetric-groups": integers(8, 32, BFLOAT16),
    "packed-4-act-order": integers(4, 32, BFLOAT16, act_order=True),
    "packed-8-act-order": integers(8, 32, symmetric=False, act_order=True),
    "packed-8-asymmetric": integers(8, None, symmetric=False),
    "gptq-4-bfloat16": gptq(4, 32, dtype=BFLOAT16),
    "gptq-4-float32": gptq(4, 32, dtype=FLOAT32),
    "gptq-4-asymmetric-bfloat16": gptq(4, 32, symmetric=False, dtype=BFLOAT16),
    "gptq-4-no-groups-bfloat16": gptq(4, -1, dtype=BFLOAT16),
    "gptq-8-no-groups": gptq(8, -1),
    "gptq-8-asymmetric": gptq(8, -1, symmetric=False),
    "awq-gemm-bfloat16": awq(32, dtype=BFLOAT16),
    "awq-gemv-bfloat16": awq(32, "gemv", dtype=BFLOAT16),
}

DEQUANTIZED = ("gptq-4-uneven", "packed-4-groups-of-16")
"""Formats whose layers are dequantised."""

KEPT: dict[str, Scheme] = {name: scheme for name, scheme in SCHEMES.items() if name not in DEQUANTIZED}
"""Formats whose integers and scales an engine keeps if the inputs are whole blocks."""


def publish(
    model: Path,
    directory: Path,
    scheme: Scheme,
    exclude: tuple[str, ...] = (),
    shards: int = 1,
    *,
    exact: bool = False,
) -> Path:
    """Writes `directory`/published, a model whose linear layers except `exclude` are quantised, and `directory`/values.

    `values` has the tensors' values in float32: rounded as the library does, or exact. Experts count as linear layers.
    """
    rng = np.random.default_rng(0)
    tensors: dict[str, Array] = {}
    values: dict[str, Array] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        source = name.removesuffix(".weight")
        if not source.endswith(("_proj", ".w1", ".w2", ".w3")) or source.endswith(exclude):
            tensors[name] = values[name] = tensor
            continue
        layer = scheme.quantize(tensor.astype(np.float32), rng)
        tensors |= {source + suffix: part.copy(order="C") for suffix, part in layer.tensors.items()}
        made = layer.exact if exact else layer.values
        assert made is not None
        values[name] = made.astype(np.float32)
    config = json.loads((model / "config.json").read_text())
    write(directory / "values", config, values)
    return write(directory / "published", {**config, "quantization_config": scheme.config}, tensors, shards)


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Array], shards: int = 1) -> Path:
    """Writes a model directory with one file or several; a layer's tensors may be in different files."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    file_of = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return directory

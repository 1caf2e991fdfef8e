"""GPTQ in the layout of AutoGPTQ, GPTQModel, OmniQuant and AutoRound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from ...._core import QuantAlgo
from ....common.json_fields import JsonFields, describe
from ...checkpoint.casting import CHECKPOINT_DTYPES, Array, to_float32
from ...checkpoint.hf_weights import HfWeights, MadeMatrix
from ...checkpoint.quantization import GROUP_SIZES, QuantConfig
from ...checkpoint.quantizer import QuantizedRows
from .formats import (
    INT32,
    group_problems,
    in_steps,
    matrices_of,
    of_eight_bits,
    of_four_bits,
    order_of_groups,
    scaled,
    tensor_problems,
    with_groups,
    with_scales,
)
from .packed_numbers import unpacked

METHOD: Final = "gptq"
_BITS: Final = (2, 3, 4, 8)
_LESS_ONE: Final = "gptq"
_PLAIN: Final = "gptq_v2"
_WORD_BITS: Final = 32
_WRITES_BORROWS: Final = "gptqmodel"
# Settings of calibration, and kernel choices; they do not change the tensors.
HARMLESS: Final = tuple(
    """
    act_bits act_data_type act_dynamic act_group_aware act_group_size act_sym amp autoround_version backend batch_size
    block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent data_type dataset disable_exllama
    enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input exllama_config gradient_accumulate_steps hyb_act
    iters lm_head low_cpu_mem_usage low_gpu_mem_usage lr max_input_length method minmax_lr model_file_base_name
    model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize
    modules_to_not_convert mse n_samples nsamples offload_to_disk offload_to_disk_path pad_token_id provider
    quant_block_list scale_dtype seqlen static_attention_granularity static_groups static_kv_granularity super_bits
    super_group_size to_quant_block_names tokenizer train_bs true_sequential use_cuda_fp16 use_exllama
    """.split()
)


def read_gptq(fields: JsonFields) -> Gptq | None:
    """Reads GPTQ's quantization_config. Notes problems in `fields`; the result may be None then."""
    bits = fields.integer("bits", maximum=_WORD_BITS)
    if bits not in _BITS:
        fields.problem("bits", f"is {bits}; accepted: {', '.join(map(str, _BITS))}")
    group_size = read_group_size(fields)
    symmetric = fields.boolean("sym", default=True)
    # Ignored: g_idx tells if inputs are permuted.
    fields.boolean("desc_act", default=False)
    names = [name for name in ("checkpoint_format", "format") if fields.raw(name) is not None]
    layouts = {fields.string(name, choices=(_LESS_ONE, _PLAIN)) for name in names}
    if len(layouts) > 1:
        fields.problem("checkpoint_format", "and format differ; expected one of them")
    fields.string("pack_dtype", choices=("int32",), default="int32")
    if fields.boolean("is_marlin_format", default=False):
        fields.problem("is_marlin_format", "is true; only false is supported")
    _refuse_settings_of_layers(fields)
    meta = fields.raw("meta")
    fields.discard(HARMLESS)
    kept = None
    if bits <= 4 and group_size in (None, *GROUP_SIZES):
        kept = QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=group_size, has_zero_point=not symmetric, bits=bits)
    elif bits == 8 and group_size in (None, *GROUP_SIZES):
        kept = QuantConfig(quant_algo=QuantAlgo.W8A16, group_size=group_size, has_zero_point=not symmetric)
    return Gptq(
        bits=bits if bits in _BITS else _BITS[0],
        group_size=group_size,
        zeros_less_one=layouts != {_PLAIN},
        borrows=_WRITES_BORROWS in str(meta.get("quantizer") if isinstance(meta, dict) else "").lower(),
        kept=kept,
    )


def read_group_size(fields: JsonFields) -> int | None:
    """Reads group_size of GPTQ and AWQ; None: all inputs."""
    size = fields.integer("group_size", minimum=-1, default=128)
    if size == 0:
        fields.problem("group_size", "is 0; accepted: -1, or a number of inputs")
    return size if size > 0 else None


def _refuse_settings_of_layers(fields: JsonFields) -> None:
    """Refuses layers with settings of their own in `dynamic`.

    Entries that begin with "-:" name layers that are not quantised; the tensors tell these as well.
    """
    dynamic = fields.raw("dynamic")
    if dynamic in (None, {}, False):
        return
    if not isinstance(dynamic, dict) or any(not name.startswith("-:") for name in dynamic):
        fields.problem("dynamic", f"is {describe(dynamic)}; accepted: only entries that begin with '-:'")


@dataclass(frozen=True)
class Gptq:
    """w = scale (u - zero); each output and group of inputs has a scale and a zero point."""

    bits: int
    group_size: int | None
    """Inputs per group; None: all inputs."""
    zeros_less_one: bool
    """True if the zero points are stored less one."""
    borrows: bool
    """True if one was subtracted from whole words, so that a zero point of 0 borrows from the next one."""
    kept: QuantConfig | None
    has_model_dtype: bool = False
    rounds_activations: bool = False
    method: str = METHOD

    def describe(self) -> str:
        """See PublishedFormat.describe."""
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"GPTQ of {self.bits} bits{groups}"

    def matrices(self, weights: HfWeights) -> dict[str, MadeMatrix]:
        """See PublishedFormat.matrices."""

        def matrix_of(source: str) -> tuple[MadeMatrix, list[str]]:
            matrix = _Matrix(weights, source, self)
            return matrix, matrix.problems()

        return matrices_of(weights, ".qweight", self.describe(), matrix_of)


@dataclass(frozen=True)
class _Matrix:
    weights: HfWeights
    source: str
    how: Gptq

    @property
    def tensors(self) -> tuple[str, ...]:
        """See MadeMatrix.tensors."""
        names = tuple(f"{self.source}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
        return tuple(name for name in names if name in self.weights)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """[out, in]; the words are [in * bits / 32, out]."""
        words, outputs = self.weights.spec(f"{self.source}.qweight").shape
        return outputs, words * _WORD_BITS // self.how.bits

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the scales, in which GPTQModel multiplies."""
        return self.weights.spec(f"{self.source}.scales").dtype

    @property
    def _groups(self) -> int:
        return 1 if self.how.group_size is None else -(-self.shape[1] // self.how.group_size)

    def problems(self) -> list[str]:
        """Lists problems of the tensors."""
        bits, where = self.how.bits, self.weights.where(f"{self.source}.qweight")
        stored = self.weights.spec(f"{self.source}.qweight").shape
        if len(stored) != 2 or stored[0] * _WORD_BITS % bits != 0 or stored[1] * bits % _WORD_BITS != 0:
            return [
                f"{where}: is {list(stored)}; expected [in * {bits} / 32, out], in and out being multiples that fill "
                "words of 32 bits"
            ]
        outputs, inputs = self.shape
        words = inputs * bits // _WORD_BITS
        expected: dict[str, Any] = {
            f"{self.source}.qweight": ((INT32,), (words, outputs)),
            f"{self.source}.qzeros": ((INT32,), (self._groups, outputs * bits // _WORD_BITS)),
            f"{self.source}.scales": (CHECKPOINT_DTYPES, (self._groups, outputs)),
        }
        if f"{self.source}.g_idx" in self.weights:
            expected[f"{self.source}.g_idx"] = ((INT32, np.dtype(np.int64)), (inputs,))
        return tensor_problems(self.weights, expected) or [*self._group_problems(), *self._zero_problems()]

    def _group_problems(self) -> list[str]:
        name = f"{self.source}.g_idx"
        return group_problems(self.weights, name, self._groups) if name in self.weights else []

    def _zero_problems(self) -> list[str]:
        if not self.how.zeros_less_one or self.how.borrows:
            return []
        name = f"{self.source}.qzeros"
        greatest = 2**self.how.bits - 1
        if not (unpacked(self.weights.joined_rows(name), self.how.bits) == greatest).any():
            return []
        return [
            f"{self.weights.where(name)}: holds {greatest}, a zero point stored less one, which AutoGPTQ and "
            f"GPTQModel read differently; accepted: checkpoint_format {_PLAIN}, or a model that GPTQModel "
            "wrote (meta.quantizer)"
        ]

    def _group_of_inputs(self) -> Array:
        name = f"{self.source}.g_idx"
        if name in self.weights:
            return self.weights.joined_rows(name)
        size = self.shape[1] if self.how.group_size is None else self.how.group_size
        return np.arange(self.shape[1]) // size

    def _zeros(self) -> Array:
        """Zero points int16 [groups, out]."""
        words, bits = self.weights.joined_rows(f"{self.source}.qzeros"), self.how.bits
        if self.how.zeros_less_one and bits != 3:
            ones = np.uint32(sum(1 << place for place in range(0, _WORD_BITS, bits)))
            words = words.view(np.uint32) + ones
        zeros = unpacked(words, bits).astype(np.int16)
        if self.how.zeros_less_one and bits == 3:
            # Three-bit numbers may span two words, so GPTQModel adds to each number.
            zeros = (zeros + 1) & 7
        return zeros

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeMatrix.rows. Equals the result of GPTQModel's dequantize_weight."""
        groups, zeros = self._group_of_inputs(), self._zeros()
        scales = to_float32(self.weights.joined_rows(f"{self.source}.scales"))
        for taken, numbers in self._numbers(rows, step):
            these = slice(taken.start, taken.stop)
            differences = numbers.astype(np.int16) - zeros[:, these].T[:, groups]
            yield scaled(differences, scales[:, these].T[:, groups], self.dtype)

    def _numbers(self, rows: range, step: int) -> Iterator[tuple[range, Array]]:
        """Yields rows and their numbers uint8 [rows, in].

        An output is a column of the file, so this reads all words once.
        """
        words = self.weights.joined_rows(f"{self.source}.qweight")
        for taken in in_steps(rows, step):
            yield taken, unpacked(words[:, taken.start : taken.stop].T, self.how.bits)

    def kept_as(self) -> QuantConfig | None:
        """See QuantizedMatrix.kept_as."""
        if not self._has_zeros and not (self._zeros() == self._middle).all():
            return None
        kept = with_scales(self.how.kept, self.weights.joined_rows(f"{self.source}.scales"))
        return with_groups(kept, self._group_of_inputs())

    def permutation(self) -> Array:
        """See ActOrderMatrix.permutation."""
        return order_of_groups(self._group_of_inputs())

    @property
    def _middle(self) -> int:
        return 1 << (self.how.bits - 1)

    @property
    def _has_zeros(self) -> bool:
        return self.how.kept is not None and self.how.kept.has_zero_point

    def quantized_rows(self, rows: range, step: int, how: QuantConfig) -> Iterator[QuantizedRows]:
        """See QuantizedMatrix.quantized_rows."""
        scales, zeros, order = self.weights.joined_rows(f"{self.source}.scales"), self._zeros(), self.permutation()
        for taken, unordered in self._numbers(rows, step):
            these = slice(taken.start, taken.stop)
            numbers = unordered[:, order]
            of_rows = np.ascontiguousarray(scales[:, these].T)
            own = np.ascontiguousarray(zeros[:, these].T.astype(np.uint8)) if self._has_zeros else None
            if self.how.bits == 8:
                yield of_eight_bits(numbers, of_rows, own, how)
            else:
                # Without zero points, packed numbers have an offset of 8.
                centred = numbers if self._has_zeros else numbers + np.uint8(8 - self._middle)
                yield of_four_bits(centred, of_rows, own, how)

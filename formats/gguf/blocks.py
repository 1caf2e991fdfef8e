"""Types of tensors in GGUF files, and their values as float32.

A row of a tensor consists of blocks of `block_size` values in `block_bytes` bytes. Each function below takes the bytes
[blocks, block_bytes] and returns the values [blocks, block_size]. Products and sums are in ggml's order, so each value
has the same bits as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_SMALL: Final = 32
"""Values in a block of the older types."""
_LARGE: Final = 256
"""Values in a super-block of the K types."""
_IQ4_VALUES: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_FP4_VALUES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""FP4's values times two."""


@dataclass(frozen=True)
class Parts:
    """Parts of blocks, whose values are scales * integers - minimums, each in float32."""

    scales: Array
    """float32 [blocks, groups]."""
    integers: Array
    """int8 [blocks, block_size]; for MXFP4, codes of FP4 as uint8. Not negative if there are minimums."""
    minimums: Array | None = None
    """float32 [blocks, groups]."""

    def values(self) -> Array:
        """Returns float32 [blocks, groups, numbers of a group]."""
        numbers = self.integers.reshape(*self.scales.shape, -1).astype(np.float32)
        products: Array = self.scales[:, :, None] * numbers
        return products if self.minimums is None else products - self.minimums[:, :, None]


@dataclass(frozen=True)
class BlockType:
    """A type of tensors."""

    name: str
    """ggml's name."""
    block_size: int
    block_bytes: int
    dtype: np.dtype[Any]
    """Type of the values that `values()` returns: float32 for quantised types."""
    dequantize: Callable[[Array], Array] | None = None
    """None: the values are stored in `dtype`."""
    split: Callable[[Array], Parts] | None = None
    """Returns the integers of quantised types, with their scales and minimums."""

    @property
    def is_quantized(self) -> bool:
        """True for types with blocks of integers and scales."""
        return self.dequantize is not None

    def bytes_of(self, num_values: int) -> int:
        """Size of a row of `num_values` values, a multiple of block_size."""
        return num_values // self.block_size * self.block_bytes

    def values(self, rows: Array) -> Array:
        """Returns the values [rows, width] of uint8 bytes [rows, row_bytes]."""
        if self.dequantize is None:
            return np.ascontiguousarray(rows).view(self.dtype)
        blocks = np.ascontiguousarray(rows).reshape(-1, self.block_bytes)
        # A scale may be infinite or NaN. Casting to the checkpoint's type refuses such values with their tensor.
        with np.errstate(invalid="ignore", over="ignore"):
            return self.dequantize(blocks).reshape(rows.shape[0], -1)


def _half(blocks: Array, first: int) -> Array:
    """The float16 at byte `first` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """Four-bit numbers, [..., bytes] to [..., 2 * bytes]: the lower halves of all bytes, then the upper ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _high_bits(blocks: Array, first: int) -> Array:
    """The 32 bits from byte `first` on, as 0 or 16 [blocks, 32]: the fifth bits of Q5_0 and Q5_1."""
    return np.unpackbits(np.ascontiguousarray(blocks[:, first : first + 4]), axis=1, bitorder="little") << 4


def _q4_0(blocks: Array) -> Parts:
    return Parts(_half(blocks, 0), _nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8))


def _q4_1(blocks: Array) -> Parts:
    return Parts(_half(blocks, 0), _nibbles(blocks[:, 4:]).view(np.int8), -_half(blocks, 2))


def _q5_0(blocks: Array) -> Parts:
    numbers = _nibbles(blocks[:, 6:]) | _high_bits(blocks, 2)
    return Parts(_half(blocks, 0), numbers.astype(np.int8) - np.int8(16))


def _q5_1(blocks: Array) -> Parts:
    numbers = _nibbles(blocks[:, 8:]) | _high_bits(blocks, 4)
    return Parts(_half(blocks, 0), numbers.view(np.int8), -_half(blocks, 2))


def _q8_0(blocks: Array) -> Parts:
    return Parts(_half(blocks, 0), blocks[:, 2:].view(np.int8))


def _two_bits(packed: Array) -> Array:
    """Two-bit numbers of a super-block, [blocks, 64] to [blocks, 2, 4, 32].

    Each half of 32 bytes holds four times 32 numbers, the first ones in the lowest bits.
    """
    halves = packed.reshape(-1, 2, 1, 32)
    return (halves >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & 3


def _large(scales: Array, numbers: Array, minimums: Array | None = None) -> Parts:
    """The parts of super-blocks; `numbers` are of any shape."""
    return Parts(scales, numbers.reshape(len(scales), -1).view(np.int8), minimums)


def _q2_k(blocks: Array) -> Parts:
    scales = blocks[:, :16]
    factors = _half(blocks, 80) * (scales & 15).astype(np.float32)
    offsets = _half(blocks, 82) * (scales >> 4).astype(np.float32)
    return _large(factors, _two_bits(blocks[:, 16:80]), offsets)


def _q3_k(blocks: Array) -> Parts:
    high_bits, packed = blocks[:, :32], blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (low | high << 4).astype(np.float32) - 32
    bits = np.arange(8, dtype=np.uint8).reshape(2, 4, 1)
    fours = (high_bits.reshape(-1, 1, 1, 32) >> bits & 1) << 2
    numbers = (_two_bits(blocks[:, 32:96]) + fours).astype(np.int8) - np.int8(4)
    return _large(_half(blocks, 108) * scales, numbers)


def _scales_and_minimums(packed: Array) -> tuple[Array, Array]:
    """Eight scales and eight minimums of six bits each, from 12 bytes [blocks, 12]: float32 [blocks, 8]."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minimums = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _with_minimums(blocks: Array, numbers: Array) -> Parts:
    """Q4_K and Q5_K: eight groups of 32 numbers, whose scales and minimums follow the block's two float16."""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    return _large(_half(blocks, 0) * scales, numbers, _half(blocks, 2) * minimums)


def _q4_k(blocks: Array) -> Parts:
    return _with_minimums(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def _q5_k(blocks: Array) -> Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1) << 4
    return _with_minimums(blocks, low | high)


def _q6_k(blocks: Array) -> Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    numbers = (low | _two_bits(blocks[:, 128:192]) << 4).astype(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _large(_half(blocks, 208) * scales, numbers)


def _iq4_nl(blocks: Array) -> Parts:
    return Parts(_half(blocks, 0), _IQ4_VALUES[_nibbles(blocks[:, 2:])])


def _iq4_xs(blocks: Array) -> Parts:
    high_bits = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    high = (high_bits >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    scales = (low | high << 4).astype(np.float32) - 32
    numbers = _IQ4_VALUES[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    return _large(_half(blocks, 0) * scales, numbers)


def _mxfp4_codes(blocks: Array) -> Parts:
    return Parts(np.ldexp(np.float32(1.0), blocks[:, :1].astype(np.int32) - 127), _nibbles(blocks[:, 1:]))


def _mxfp4(blocks: Array) -> Array:
    exponents = blocks[:, :1].astype(np.uint32)
    # Half of 2^(e - 127). It is subnormal for exponents of 0 and 1.
    bits = np.where(exponents < 2, np.uint32(0x00200000) << np.minimum(exponents, 1), (exponents - 1) << 23)
    return bits.astype(np.uint32).view(np.float32) * _FP4_VALUES[_nibbles(blocks[:, 1:])]


def _of_integers(name: str, block_size: int, block_bytes: int, split: Callable[[Array], Parts]) -> BlockType:
    return BlockType(name, block_size, block_bytes, _FLOAT32, lambda blocks: split(blocks).values(), split)


_FLOAT32: Final = np.dtype("<f4")
TYPES: Final[Mapping[int, BlockType]] = {
    0: BlockType("F32", 1, 4, _FLOAT32),
    1: BlockType("F16", 1, 2, np.dtype("<f2")),
    2: _of_integers("Q4_0", _SMALL, 18, _q4_0),
    3: _of_integers("Q4_1", _SMALL, 20, _q4_1),
    6: _of_integers("Q5_0", _SMALL, 22, _q5_0),
    7: _of_integers("Q5_1", _SMALL, 24, _q5_1),
    8: _of_integers("Q8_0", _SMALL, 34, _q8_0),
    10: _of_integers("Q2_K", _LARGE, 84, _q2_k),
    11: _of_integers("Q3_K", _LARGE, 110, _q3_k),
    12: _of_integers("Q4_K", _LARGE, 144, _q4_k),
    13: _of_integers("Q5_K", _LARGE, 176, _q5_k),
    14: _of_integers("Q6_K", _LARGE, 210, _q6_k),
    20: _of_integers("IQ4_NL", _SMALL, 18, _iq4_nl),
    23: _of_integers("IQ4_XS", _LARGE, 136, _iq4_xs),
    30: BlockType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    39: BlockType("MXFP4", _SMALL, 17, _FLOAT32, _mxfp4, _mxfp4_codes),
}
"""Types that are read, by ggml's numbers."""
ACCEPTED_TYPES: Final = ", ".join(each.name for each in TYPES.values())
_UNREAD: Final[Mapping[int, str]] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}


def unread_type(number: int) -> str:
    """Name of a type that is not in TYPES."""
    return _UNREAD.get(number, f"{number} (not known to this release)")

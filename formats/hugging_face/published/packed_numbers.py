"""Numbers of a few bits that are packed in words of 32."""

from __future__ import annotations

import numpy as np

from ...checkpoint.casting import Array


def unpacked(words: Array, bits: int) -> Array:
    """uint8 [rows, words * 32 / bits]: the unsigned numbers in words [rows, words], the first in the lowest bits.

    Numbers of 3 bits go from one word to the next where they have to: 32 of them take three words.
    """
    octets = np.ascontiguousarray(words).astype(words.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    octets = octets.reshape(len(words), -1)
    if bits == 8:
        return octets
    if bits == 3:
        flags = np.unpackbits(octets, axis=1, bitorder="little").reshape(len(words), -1, bits)
        return np.packbits(flags, axis=2, bitorder="little")[:, :, 0]
    per_octet = 8 // bits
    numbers = np.empty((len(octets), per_octet * octets.shape[1]), np.uint8)
    for place in range(per_octet):
        numbers[:, place::per_octet] = (octets >> (bits * place)) & (2**bits - 1)
    return numbers

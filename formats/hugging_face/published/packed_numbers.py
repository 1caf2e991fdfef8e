"""Unpacks numbers of a few bits from 32-bit words."""

from __future__ import annotations

import numpy as np

from ...checkpoint.casting import Array


def unpacked(words: Array, bits: int) -> Array:
    """Unpacks words [rows, words] to unsigned numbers uint8 [rows, words * 32 / bits], the lowest bits first.

    Numbers of 3 bits may span two words: three words hold 32 of them.
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

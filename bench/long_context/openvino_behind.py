"""openvino_behind.py MODEL MOST CHUNK THREADS: computes tokens after a context, as requested on stdin.

Runs in OpenVINO's virtual environment. For each input line "TOKENS BEHIND" it prints the seconds that TOKENS took after
a context of BEHIND tokens. The KV cache has room for MOST tokens and one chunk; it is filled with the keys and values
of one chunk, repeated.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import openvino
from openvino._offline_transformations import paged_attention_transformation
from openvino_context import settings

TOKENS_PER_BLOCK = 32


class PagedModel:
    """The model as OpenVINO GenAI runs it: paged attention, one sequence."""

    def __init__(self, directory: str, most: int, threads: int) -> None:
        core = openvino.Core()
        model = core.read_model(f"{directory}/openvino_model.xml")
        paged_attention_transformation(model)
        compiled = core.compile_model(model, "CPU", settings(threads))
        self._request = compiled.create_infer_request()
        self._caches = []
        for port in compiled.inputs:
            if "_cache." in port.get_any_name():
                _, heads, rows, width = (dimension.get_max_length() for dimension in port.get_partial_shape())
                blocks = -(-most // TOKENS_PER_BLOCK)
                cache = openvino.Tensor(port.get_element_type(), openvino.Shape([blocks, heads, rows, width]))
                cache.data[:] = 0
                self._request.set_tensor(port, cache)
                self._caches.append(cache)

    def run(self, tokens: np.ndarray, behind: int) -> None:
        """Computes the tokens after a context of `behind` tokens."""
        length = behind + len(tokens)
        blocks = np.arange(-(-length // TOKENS_PER_BLOCK), dtype=np.int32)
        self._request.infer(
            {
                "input_ids": tokens,
                "position_ids": np.arange(behind, length),
                "max_context_len": np.array(length, np.int32),
                "past_lens": np.array([behind], np.int32),
                "subsequence_begins": np.array([0, len(tokens)], np.int32),
                "block_indices_begins": np.array([0, len(blocks)], np.int32),
                "block_indices": blocks,
            }
        )

    def repeat(self, tokens: int) -> None:
        """Fills the cache with repeated copies of the first `tokens` keys and values."""
        blocks = tokens // TOKENS_PER_BLOCK
        for cache in self._caches:
            for first in range(blocks, len(cache.data), blocks):
                copied = cache.data[first : first + blocks]
                copied[:] = cache.data[: len(copied)]


def main(directory: str, most: int, chunk: int, threads: int) -> None:
    """Answers until the input ends."""
    model = PagedModel(directory, most + chunk, threads)
    tokens = np.random.default_rng(0).integers(100, 20000, chunk)
    model.run(tokens, 0)
    model.repeat(chunk)
    for line in sys.stdin:
        count, behind = map(int, line.split())
        begin = time.perf_counter()
        model.run(tokens[:count], behind)
        print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

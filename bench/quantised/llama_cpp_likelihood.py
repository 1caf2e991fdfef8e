"""llama_cpp_likelihood.py HOME GGUF FOLDER THREADS REPACK: measures a GGUF file on the windows of FOLDER.

Runs in llama.cpp's virtual environment, with the library of HOME/llama-build and the bindings in its sources. REPACK 0
does not repack the file's weights. Prints the result of likelihood.py.
"""

from __future__ import annotations

import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from likelihood import Array, report


def main(home: Path, model: Path, folder: Path, threads: int, repack: bool) -> None:
    """Measures one file."""
    api = bindings(home)
    api.llama_backend_init()
    model_params = api.llama_model_default_params()
    model_params.use_extra_bufts = repack
    loaded = api.llama_model_load_from_file(str(model).encode(), model_params)
    length = 512
    context_params = api.llama_context_default_params()
    context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = length
    context_params.n_threads = context_params.n_threads_batch = threads
    context = api.llama_init_from_model(loaded, context_params)
    if not loaded or not context:
        raise RuntimeError(f"{model}: llama.cpp does not load it")
    batch = api.llama_batch_init(length, 0, 1)
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))

    def logits_of(ids: list[int]) -> Array:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        if api.llama_decode(context, batch) != 0:
            raise RuntimeError(f"{model}: llama.cpp does not run a window of {len(ids)} tokens")
        return np.ctypeslib.as_array(api.llama_get_logits(context), (len(ids), vocabulary))

    report(folder, logits_of, bits_of_layers(model))


def bindings(home: Path) -> Any:
    """Imports only the C interface: the package around it needs modules that are not installed."""
    sources = next(home.glob("llama_cpp_python-*/llama_cpp"))
    os.environ["LLAMA_CPP_LIB_PATH"] = str(home / "llama-build" / "bin")
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(sources)]
    sys.modules["llama_cpp"] = package
    from llama_cpp import llama_cpp

    return llama_cpp


def bits_of_layers(model: Path) -> float:
    """Bits per weight of the layers' matrices, including scales."""
    matrices = [
        tensor for tensor in gguf.GGUFReader(model).tensors if tensor.name.startswith("blk.") and len(tensor.shape) == 2
    ]
    weights = sum(math.prod(tensor.shape.tolist()) for tensor in matrices)
    return 8 * sum(int(tensor.n_bytes) for tensor in matrices) / weights


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), int(sys.argv[4]), sys.argv[5] == "1")

"""Damaged GGUF files of models cost an error of AdaptRT, and nothing else."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaptrt import AdaptrtError, CheckpointError
from adaptrt.formats.gguf.adapter_directory import write_adapter_directory
from adaptrt.formats.gguf.model_directory import write_model_directory
from adaptrt.formats.gguf.tensors import GgufWeights

gguf_files = pytest.importorskip("support.gguf_files")

KEYS = {
    "context_length": 64,
    "embedding_length": 8,
    "block_count": 1,
    "feed_forward_length": 8,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 4,
    "attention.value_length": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 16,
    "expert_count": 2,
    "expert_used_count": 1,
    "expert_feed_forward_length": 8,
    "rope.freq_base": 1e4,
}
NAMES = {
    "llama": ["attn_q.weight", "attn_qkv.weight", "ffn_gate_exps.weight"],
    "gemma2": ["attn_q.weight", "attn_norm.weight", "ffn_up.weight"],
    "gpt-oss": ["attn_sinks.weight", "ffn_gate_exps.bias", "ffn_gate_exps.weight"],
}


@pytest.fixture(scope="module", params=list(NAMES))
def content(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with a tokenizer and some tensors of an architecture."""
    architecture = request.param
    kinds = [gguf_files.UNKNOWN, gguf_files.CONTROL, gguf_files.CONTROL, gguf_files.NORMAL, gguf_files.NORMAL]
    tokens = ["<unk>", "<s>", "</s>", "a", "▁a", "▁"]
    keys = gguf_files.sentencepiece_keys(tokens, [*kinds, gguf_files.NORMAL], [0.0, 0.0, 0.0, -1.0, -2.0, -3.0])
    keys |= {f"{architecture}.{name}": value for name, value in KEYS.items()}
    keys |= {"tokenizer.chat_template": "x", "tokenizer.chat_templates": ["tools"], "general.sampling.temp": 0.5}
    keys |= {"tokenizer.chat_template.tools": "y"}
    tensors = {
        "token_embd.weight": (np.ones((8, 8), np.float32), None),
        "rope_freqs.weight": (np.ones(2, np.float32), None),
    }
    for name in NAMES[architecture]:
        stacked = name.startswith("ffn_gate_exps")
        shape = ((2, 8) if name.endswith("bias") else (2, 8, 8)) if stacked else (8,) if "s" in name[5:9] else (8, 8)
        tensors[f"blk.0.{name}"] = np.ones(shape, np.float32), None
    path = tmp_path_factory.mktemp("damaged") / "a.gguf"
    return gguf_files.write_file(path, architecture, keys, tensors).read_bytes()  # type: ignore[no-any-return]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused(
    content: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("case")
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(24, len(damaged) - 9))
        number = data.draw(st.sampled_from([0, 1, 3, 255, 2**16, 2**31 - 1, 2**32 - 1]))
        form = data.draw(st.sampled_from(["<B", "<I"]))
        damaged[at : at + struct.calcsize(form)] = struct.pack(form, number if form == "<I" else number % 256)
    file = place / "a.gguf"
    file.write_bytes(bytes(damaged))
    for write in (write_model_directory, write_adapter_directory):
        directory = place / write.__name__
        directory.mkdir()
        with contextlib.suppress(AdaptrtError):
            write(file, directory)
    with contextlib.suppress(AdaptrtError):
        weights = GgufWeights(file)
        for name, spec in weights.specs.items():
            for rows in weights.rows(name, 0, spec.shape[0]):
                assert rows.shape[1:] == spec.shape[1:]


def test_a_number_of_layers_that_no_file_has_is_refused(tmp_path: Path, content: bytes) -> None:
    at = content.index(b".block_count") + len(b".block_count") + 4
    (tmp_path / "a.gguf").write_bytes(content[:at] + struct.pack("<I", 2**31 - 1) + content[at + 4 :])
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"block_count' is 2147483647, but there are only \d tensors"):
        write_model_directory(tmp_path / "a.gguf", tmp_path / "out")

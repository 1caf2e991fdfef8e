"""Creates the model, adapters, tokenizer and prompts for all peers, from seeds, in each peer's own format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import numpy as np
from own import BenchModel, FamilyModel, write_base, write_peft_adapter, write_tokenizer
from worker import CONTEXT, GGUF, STEP_TOKENS

from adaptrt.tools.bench.workload import random_prompt

MODELS: dict[str, BenchModel | FamilyModel] = {
    "0.5b": BenchModel(),
    "40m": BenchModel(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1408,
        tie_word_embeddings=True,
    ),
    "mixtral-1b": FamilyModel("mixtral"),
    "qwen3-moe-1b": FamilyModel("qwen3-moe"),
    "qwen3.5-0.5b": FamilyModel("qwen3.5"),
    "qwen3.5-moe-1b": FamilyModel("qwen3.5-moe"),
    "deepseek-v2-0.4b": FamilyModel("deepseek-v2"),
}
RANKS = (8, 16, 32, 64)
LORAS, DORAS = 16, 8
SHORT, LONG, LONGEST = 64, 512, 8192
ENGINES: dict[str, tuple[str, list[str]]] = {
    "bf16": ("bf16", []),
    "compressed": ("compressed", ["--compress_weights"]),
    "int8": ("w8a8", ["--quantization", "w8a8"]),
    "w8a16": ("w8a16", ["--quantization", "w8a16"]),
    "int4": ("w4a16", ["--quantization", "w4a16", "--group_size", "128"]),
    **{kind: (kind, []) for kind in GGUF},
}
"""Name of AdaptRT's engine for each kind of weights (rows.py), and its build flags."""


def title_of_model(name: str) -> str:
    """Title for tables and plots."""
    return f"{name} Llama" if isinstance(MODELS[name], BenchModel) else name


def make_model(name: str, home: Path) -> Path:
    """Creates base model, adapters and prompts in `home`; existing ones are kept."""
    model, root = MODELS[name], home / "models" / name
    base = root / "base"
    if not (base / "tokenizer.json").exists():
        if not (base / "config.json").exists():
            write_base(model, base)
        write_tokenizer(model.vocab_size, base)
    prompts = root / "prompts.json"
    if not prompts.exists():
        generator = np.random.default_rng(0)
        lengths = {"short": [SHORT] * LORAS, "long": [LONG], "longest": [LONGEST]}
        prompts.write_text(json.dumps({
            kind: [random_prompt(length, model.vocab_size, generator) for length in wanted]
            for kind, wanted in lengths.items()
        }))  # fmt: skip
    if isinstance(model, FamilyModel):
        return root
    for kind, count in (("lora", LORAS), ("dora", DORAS)):
        for number in range(count):
            directory = root / "adapters" / f"{kind}{number:02d}"
            if not (directory / "adapter_model.safetensors").exists():
                rank, dora = RANKS[number % len(RANKS)], kind == "dora"
                write_peft_adapter(model, base, directory, rank, seed=number + 100 * dora, dora=dora)
    return root


def export_for(peer: str, root: Path, home: Path, weights: Collection[str]) -> None:
    """Converts the Hugging Face directory to the peer's own format, for these kinds of weights (rows.py).

    Existing files are kept. Raises CalledProcessError if the peer's tools fail.
    """
    exporter = {"adaptrt": _build_engines, "openvino": _export_openvino, "llama_cpp": _convert_gguf}.get(peer)
    if exporter is not None:
        exporter(root, home, weights)


def _build_engines(root: Path, home: Path, weights: Collection[str]) -> None:
    """AdaptRT's engines: activations in bfloat16, and LoRA and DoRA up to rank 64 if the model has adapters."""
    adapters = ["--lora_plugin", "auto", "--dora_plugin", "enable", "--max_lora_rank", max(RANKS)]
    command = [sys.executable, "-m", "adaptrt.builder.cli"]
    _convert_gguf(root, home, files := [kind for kind in weights if kind in GGUF])
    for kind in weights:
        name, flags = ENGINES[kind]
        model = root / "gguf" / f"base-{kind}.gguf" if kind in files else root / "base"
        engine = root / f"adaptrt-{name}"
        if not (engine / "config.json").exists():
            _run([*command, "build", "--model_dir", model, "--dtype", "bfloat16", "--output_dir", engine,
                  *(adapters if (root / "adapters").is_dir() else []), "--max_batch_size", LORAS,
                  "--max_num_tokens", STEP_TOKENS, "--max_seq_len", CONTEXT, *flags])  # fmt: skip


def _export_openvino(root: Path, home: Path, weights: Collection[str]) -> None:
    """Exports with optimum-intel; int4 is u4 in groups of 128 in every layer, with int8 embedding and lm_head."""
    exports: dict[str, tuple[str, list[object]]] = {
        "bf16": ("openvino", ["fp16"]),
        "int8": ("openvino-int8", ["int8"]),
        "int4": ("openvino-int4", ["int4", "--group-size", 128, "--ratio", "1.0"]),
    }
    for kind in weights:
        if kind in exports and not (root / exports[kind][0] / "openvino_model.xml").exists():
            name, flags = exports[kind]
            _run([home / "venv-openvino" / "bin" / "optimum-cli", "export", "openvino", "--model", root / "base",
                  "--task", "text-generation-with-past", "--weight-format", *flags, root / name])  # fmt: skip


def _convert_gguf(root: Path, home: Path, weights: Collection[str]) -> None:
    """Converts with llama.cpp's converters and llama-quantize."""
    if not weights:
        return
    folder = root / "gguf"
    adapters = sorted((root / "adapters").glob("lora*"))
    if not all((folder / f"{name}.gguf").exists() for name in ("base", *(path.name for path in adapters))):
        sources = next(home.glob("llama_cpp_python-*/vendor/llama.cpp"))
        python = home / "venv-llama_cpp" / "bin" / "python"
        _run([python, Path(__file__).with_name("convert_gguf.py"), sources, root])
    for kind, name in (("int8", "q8_0"), ("int4", "q4_0"), *((kind, kind) for kind in GGUF)):
        output = folder / f"base-{name}.gguf"
        if kind in weights and not output.exists():
            _run([home / "llama-build" / "bin" / "llama-quantize", folder / "base.gguf", output, name.upper()])


def _run(command: list[object]) -> None:
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=2)

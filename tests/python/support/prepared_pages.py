"""Names, files and servers that the code blocks of some pages need, and that their text leaves to the reader."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import peft
import transformers
from safetensors.numpy import load_file, save_file

import adaptrt
from support.encoders import MODELS, VOCAB_SIZE, save_encoder
from support.pooled import save_pooled_adapter, save_sentence_transformer, save_word_tokenizer
from support.published import BFLOAT16, integers, publish

MODEL = Path("examples/demo/model")
POET = Path("examples/demo/adapters/poet")
CHATS = "Qwen3-0.6B"
"""A directory with the demo's model and a chat template."""

Run = Callable[[str], object]
"""Runs a command as if it were in a block of the page."""


def _build_with_poet(run: Run) -> None:
    run(f"adaptrt build --model_dir {CHATS} --output_dir engine --lora_plugin auto --dora_plugin enable"
        f" --max_lora_rank 16 --lora_dir {POET}")  # fmt: skip


def _embeddings(run: Run) -> dict[str, object]:
    embeds = Path(shutil.copytree(MODEL, "Qwen3-Embedding-0.6B"))
    save_sentence_transformer(embeds, "lasttoken", normalize=True)
    Path("law").symlink_to(POET)
    classifies = Path(shutil.copytree(MODEL, "a-model-for-classification"))
    fields = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "cold", "1": "warm"}}
    _edit_config(classifies, **fields, label2id={"cold": 0, "warm": 1}, pad_token_id=1)
    tensors = load_file(classifies / "model.safetensors")
    score = np.eye(2, 128).astype(next(iter(tensors.values())).dtype)
    save_file({**tensors, "score.weight": score}, classifies / "model.safetensors", {"format": "pt"})
    encoder = save_encoder(MODELS["bert"], Path("all-MiniLM-L6-v2"))
    save_sentence_transformer(encoder, "mean_tokens", normalize=True)
    save_word_tokenizer(encoder, VOCAB_SIZE)
    base = transformers.AutoModel.from_pretrained(encoder)
    save_pooled_adapter(base, Path("adapters/law"), 0, "FEATURE_EXTRACTION", target_modules=["query", "value"])
    _build_with_poet(run)
    executor = adaptrt.Executor("engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig())
    executor.add_adapter("law", POET)
    return {"executor": executor, "token_ids": [0, 52, 29]}


def _messages(run: Run) -> dict[str, object]:
    run(f"adaptrt serve {CHATS} --lora-modules poet={POET}")
    return {"anthropic": anthropic}


def _model_cache(run: Run) -> dict[str, object]:
    _build_with_poet(run)
    return {}


def _performance(run: Run) -> dict[str, object]:
    model = Path(shutil.copytree(MODEL, "long"))
    _edit_config(model, max_position_embeddings=1024)
    run(f"adaptrt build --model_dir {model} --output_dir engine --lora_plugin auto --max_batch_size 8")
    return {}


def _python_api(run: Run) -> dict[str, object]:
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    return {"peft": peft, "peft_model": peft.PeftModel.from_pretrained(base, POET)}


def _quantised_models(run: Run) -> dict[str, object]:
    published = publish(MODEL, Path("made"), integers(4, 128, BFLOAT16))
    published.rename("w4a16")
    shutil.copy(MODEL / "tokenizer.json", "w4a16")
    Path("some.txt").write_text("Q: What is the weather in Paris?\nA: It is sunny today.\n" * 20)
    return {}


def _scaling(run: Run) -> dict[str, object]:
    return {"trtllm": adaptrt}


def _scheduling(run: Run) -> dict[str, object]:
    return {"trtllm": adaptrt, "datetime": datetime, "tokens": list(range(600))}


def _triton(run: Run) -> dict[str, object]:
    run(f"adaptrt hf-lora-convert -i {POET} -o .")
    run(f"adaptrt serve {MODEL}")
    return {}


PREPARE: dict[str, Callable[[Run], dict[str, object]]] = {
    "docs/embeddings.md": _embeddings,
    "docs/model-cache.md": _model_cache,
    "docs/performance.md": _performance,
    "docs/python-api.md": _python_api,
    "docs/quantised-models.md": _quantised_models,
    "docs/scaling.md": _scaling,
    "docs/scheduling.md": _scheduling,
    "docs/serving-messages.md": _messages,
    "docs/serving-triton.md": _triton,
}
"""Functions that prepare a page before its first block. Each returns the names that the page's Python blocks use."""


def build_application(words: list[str]) -> None:
    """Builds the application of `serve run MODULE:FUNCTION KEY=VALUE ...` without starting Ray."""
    code = "import importlib, json, sys; module, name, args = json.loads(sys.argv[1])\n"
    code += "getattr(importlib.import_module(module), name)(args)"
    module, _, name = words[0].partition(":")
    arguments = dict(word.split("=", 1) for word in words[1:])
    subprocess.run([sys.executable, "-c", code, json.dumps([module, name, arguments])], check=True)


def _edit_config(model: Path, **fields: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

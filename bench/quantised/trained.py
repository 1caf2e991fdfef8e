"""Trains a Llama that fits every format: its sizes are multiples of 256, llama.cpp's block size.

    python bench/quantised/trained.py OUTPUT [--steps 800]

writes OUTPUT/base, a Hugging Face directory with 5.2 million parameters in bfloat16, and OUTPUT/held_out.txt, text that
is not used in training. It needs the test extra (torch, transformers), ten minutes on two cores, and no network. The
corpus is the source of Python's standard library without tests. The beginning of every twentieth file is held out.
Seeds are fixed: the same versions of Python and torch on the same processor give the same files.
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))

from models import write_tokenizer
from own import BenchModel

from adaptrt.runtime.adapter_tokenizers import load_tokenizer
from adaptrt.tools.demo_model import Training, round_to_bfloat16, train

SEED: Final = 20261126
SHAPE: Final = BenchModel(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=1024,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
LENGTH, BATCH = 256, 16
HELD_OUT_EVERY, HELD_OUT_CHARACTERS = 20, 3000
NOT_LEARNT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def main() -> None:
    """Trains and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=800, help=f"of {BATCH * LENGTH} tokens")
    options = parser.parse_args()
    base = options.output / "base"
    base.mkdir(parents=True)
    write_tokenizer(SHAPE, base)
    learnt, held_out = corpus()
    (options.output / "held_out.txt").write_text("".join(held_out))
    tokenizer = load_tokenizer(base / "tokenizer.json")
    ids = np.concatenate([np.array(tokenizer.encode(text).ids, np.int64) for text in learnt])
    print(f"{len(ids)} tokens of {len(learnt)} files; {len(held_out)} files are held out", flush=True)
    torch.manual_seed(SEED)
    model = untrained()
    training = Training(steps=options.steps, batch_size=BATCH, learning_rate=2e-3, warmup=100)
    # Otherwise casts of weights would be cached from step to step.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        train(model, batches_of(ids), training, "base")
    round_to_bfloat16(model)
    model.to(torch.bfloat16).save_pretrained(base)


def corpus() -> tuple[list[str], list[str]]:
    """Returns (training texts, beginnings of the held-out texts)."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in library.rglob("*.py") if not NOT_LEARNT.intersection(path.parts))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    learnt = [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY]
    return learnt, [text[:HELD_OUT_CHARACTERS] for text in texts[::HELD_OUT_EVERY]]


def untrained() -> Any:
    """An untrained Llama of this shape. Its texts have no begin or end token."""
    config = transformers.LlamaConfig(**vars(SHAPE), rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1)
    return transformers.LlamaForCausalLM(config)


def batches_of(ids: np.ndarray[Any, np.dtype[Any]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (tokens, targets), int64 [batch, length], from random positions."""
    generator = random.Random(SEED)
    while True:
        begins = [generator.randrange(len(ids) - LENGTH) for _ in range(BATCH)]
        rows = torch.tensor(np.stack([ids[begin : begin + LENGTH + 1] for begin in begins]))
        yield rows[:, :-1], rows[:, 1:]


if __name__ == "__main__":
    main()

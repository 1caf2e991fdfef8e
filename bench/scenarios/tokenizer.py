"""A tokenizer for models of random weights."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|pad|>"]
# Llama 3's pattern; llama.cpp's converter gets its name.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tokenizer(vocab_size: int, base: Path, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> None:
    """Trains a byte-level BPE of `vocab_size` tokens on Python's standard library: converters need a tokenizer.

    special_tokens: the first tokens; they begin with SPECIAL_TOKENS.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in library_files()], trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|unused_{number}|>" for number in range(missing)])
    tokenizer.save(str(base / "tokenizer.json"))
    begin, end, pad = SPECIAL_TOKENS
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end, "pad_token": pad}
    (base / "tokenizer_config.json").write_text(json.dumps(config))


def library_files() -> Iterator[Path]:
    """Python's modules: text that every machine has."""
    yield from sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))

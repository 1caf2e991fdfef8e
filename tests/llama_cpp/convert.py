"""convert.py SOURCES OUTPUT MODEL [--adapter DIR] [--sentencepiece TEXT]: one model or adapter as a GGUF file of F32.

Runs llama.cpp's own converters, in llama.cpp's virtual environment (bench/peers/install.sh). SOURCES: llama.cpp's.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

PRE_TOKENIZER = "gpt-2"
"""Name of the demo's pre-tokenizer. The converter knows names only by hashes of published tokenizers."""
VOCAB_SIZE = 1024


def main() -> None:
    """Converts the model, or the adapter that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--sentencepiece", type=Path, metavar="TEXT", help="text for a tokenizer that is made first")
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.sources / "gguf-py"), str(arguments.sources)]
    name_pre_tokenizer()
    if arguments.sentencepiece is not None and not (arguments.model / "tokenizer.model").exists():
        train(arguments.sentencepiece, arguments.model / "tokenizer.model")
    common = ["--outtype", "f32", "--outfile", arguments.output]
    if arguments.adapter is None:
        run(arguments.sources / "convert_hf_to_gguf.py", arguments.model, *common)
    else:
        run(arguments.sources / "convert_lora_to_gguf.py", "--base", arguments.model, *common, arguments.adapter)


def name_pre_tokenizer() -> None:
    """Tells the converter the name of the demo's pre-tokenizer."""
    import conversion.base

    for found in vars(conversion.base).values():
        if isinstance(found, type) and hasattr(found, "get_vocab_base_pre"):
            found.get_vocab_base_pre = lambda self, tokenizer: PRE_TOKENIZER


def train(text: Path, output: Path) -> None:
    """Writes a small SentencePiece tokenizer with tokens of bytes."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(output.with_suffix("")), vocab_size=VOCAB_SIZE, model_type="bpe",
        byte_fallback=True, pad_id=0, eos_id=1, bos_id=2, unk_id=3, split_digits=True, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
    )  # fmt: skip


def run(script: Path, *arguments: object) -> None:
    """Runs a script in this process, so that the change above is active. Raises SystemExit if it fails."""
    sys.argv = [str(script), *map(str, arguments)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    main()

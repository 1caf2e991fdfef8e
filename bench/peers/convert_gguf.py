"""convert_gguf.py LLAMA_CPP_SOURCES MODEL_ROOT: converts base and LoRA adapters to GGUF with llama.cpp's converters.

Runs in llama.cpp's virtual environment.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

PRE_TOKENIZER = "llama-bpe"


def main(sources: Path, root: Path) -> None:
    """Writes MODEL_ROOT/gguf."""
    sys.path[:0] = [str(sources / "gguf-py"), str(sources)]
    name_pre_tokenizer()
    folder = root / "gguf"
    folder.mkdir(exist_ok=True)
    if not (folder / "base.gguf").exists():
        # Random models have no layers that predict several tokens, which the converter expects of Qwen3.5.
        kind = json.loads((root / "base" / "config.json").read_text()).get("model_type", "")
        flags = ["--no-mtp"] if kind.startswith("qwen3_5") else []
        run(
            sources / "convert_hf_to_gguf.py",
            root / "base",
            "--outtype",
            "bf16",
            "--outfile",
            folder / "base.gguf",
            *flags,
        )
    for adapter in sorted((root / "adapters").glob("lora*")):
        output = folder / f"{adapter.name}.gguf"
        if not output.exists():
            run(
                sources / "convert_lora_to_gguf.py",
                "--base",
                root / "base",
                "--outtype",
                "f16",
                "--outfile",
                output,
                adapter,
            )


def name_pre_tokenizer() -> None:
    """Tells the converter the name of this model's pre-tokenizer, whose hash it does not know."""
    import conversion.base

    for found in vars(conversion.base).values():
        if isinstance(found, type) and hasattr(found, "get_vocab_base_pre"):
            found.get_vocab_base_pre = lambda self, tokenizer: PRE_TOKENIZER


def run(script: Path, *arguments: object) -> None:
    """Runs `python script arguments` in this process, so that the change above is active. Raises SystemExit if it
    fails."""
    sys.argv = [str(script), *map(str, arguments)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())

"""transformers' figures of images: python transformers_worker.py ROOT THREADS DTYPE; prints JSON, seconds by row."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


def main() -> None:
    """Measures each row once, after a warm-up."""
    root, threads, dtype = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        root / "base", dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(root / "base")
    token = model.config.image_token_id

    def answer(name: str) -> dict[str, float]:
        start = time.perf_counter()
        inputs = processor([Image.open(root / "images" / name).convert("RGB")], return_tensors="pt")
        count = int(inputs["image_grid_thw"].prod()) // processor.merge_size**2
        ids = torch.tensor([[7, 5, *[token] * count, 6, 7]])
        began: dict[str, float] = {}
        encode = model.model.visual.forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            made = encode(*args, **kwargs)
            began["prefill"] = time.perf_counter()
            return made

        model.model.visual.forward = timed
        model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == token).int(),
            logits_to_keep=1,
            **inputs,
        ).logits.argmax()
        model.model.visual.forward = encode
        end = time.perf_counter()
        return {"encode": began["prefill"] - start, "prefill": end - began["prefill"], "answer": end - start}

    with torch.inference_mode():
        answer("warm.png")
        print(json.dumps(answer("large.png")))


if __name__ == "__main__":
    main()

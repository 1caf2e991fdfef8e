"""OpenVINO GenAI's figures of images: python openvino_worker.py ROOT THREADS; prints JSON, seconds by row."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from PIL import Image


def main() -> None:
    """Measures each row once, after a warm-up."""
    root, threads = Path(sys.argv[1]), int(sys.argv[2])
    pipeline = openvino_genai.VLMPipeline(str(root / "openvino"), "CPU", INFERENCE_NUM_THREADS=threads)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = 1
    config.ignore_eos, config.do_sample = True, False

    def answer(name: str) -> dict[str, float]:
        start = time.perf_counter()
        image = openvino.Tensor(np.array(Image.open(root / "images" / name).convert("RGB"))[None])
        metrics = pipeline.generate("what", images=[image], generation_config=config).perf_metrics
        seconds = time.perf_counter() - start
        # The embeddings of the text, which take no time beside the image's, are a part of this.
        encode = metrics.get_prepare_embeddings_duration().mean / 1e3
        return {"encode": encode, "prefill": seconds - encode, "answer": seconds}

    answer("warm.png")
    print(json.dumps(answer("large.png")))


if __name__ == "__main__":
    main()

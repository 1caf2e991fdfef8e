"""vLLM's figures of images: python vllm_worker.py ROOT THREADS; prints JSON, seconds by row."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Measures the row `answer` once, after a warm-up: vLLM does not tell its parts."""
    root, threads = Path(sys.argv[1]), int(sys.argv[2])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    import vllm
    from PIL import Image

    engine = vllm.LLM(
        model=str(root / "base"), dtype="bfloat16", max_model_len=2048, max_num_seqs=1, enforce_eager=True,
        enable_prefix_caching=False, limit_mm_per_prompt={"image": 1, "video": 0}, disable_log_stats=True,
    )  # fmt: skip
    sampling = vllm.SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)

    def answer(name: str) -> dict[str, float]:
        start = time.perf_counter()
        image = Image.open(root / "images" / name).convert("RGB")
        prompt = "<|vision_start|><|image_pad|><|vision_end|>what"
        engine.generate({"prompt": prompt, "multi_modal_data": {"image": image}}, sampling, use_tqdm=False)
        return {"answer": time.perf_counter() - start}

    answer("warm.png")
    print(json.dumps(answer("large.png")), file=answers, flush=True)


if __name__ == "__main__":
    main()

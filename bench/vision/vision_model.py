"""A model of Qwen2.5-VL-3B's widths with random weights, fewer layers and a smaller vocabulary, and its adapters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).parents[1]))

from adaptrt.common.safetensors_stream import SafetensorsWriter, TensorSpec
from scenarios.tokenizer import write_tokenizer

SEED: Final = 20
VOCABULARY: Final = 32000
MARKS: Final = (
    "<|begin|>",
    "<|end|>",
    "<|pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
)
IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 3, 4, 5, 6
TEMPLATE: Final = (
    "{% for m in messages %}{{ m['role'] + '\\n' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)
VISION: Final[dict[str, Any]] = {
    "model_type": "qwen2_5_vl", "depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
    "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [7], "hidden_act": "silu", "out_hidden_size": 2048, "tokens_per_second": 2,
}  # fmt: skip
"""The model has 32 layers; every eighth attends to the whole image."""
TEXT: Final[dict[str, Any]] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vocab_size": VOCABULARY,
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "use_sliding_window": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 0,
    "eos_token_id": 1, "image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END,
}  # fmt: skip
"""The model has 36 layers and 151,936 tokens."""
PROCESSOR: Final[dict[str, Any]] = {
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "min_pixels": 3136,
    "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
RANK, ADAPTERS = 16, 8
ADAPTED: Final = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def _vision_tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = VISION["hidden_size"], VISION["intermediate_size"]
    yield "visual.patch_embed.proj.weight", (width, 3, 2, 14, 14)
    for layer in range(VISION["depth"]):
        p = f"visual.blocks.{layer}"
        for norm in ("norm1", "norm2"):
            yield f"{p}.{norm}.weight", (width,)
        sizes = {"attn.qkv": (3 * width, width), "attn.proj": (width, width), "mlp.gate_proj": (inner, width),
                 "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}  # fmt: skip
        for name, shape in sizes.items():
            yield f"{p}.{name}.weight", shape
            yield f"{p}.{name}.bias", shape[:1]
    yield "visual.merger.ln_q.weight", (width,)
    for name, shape in (("0", (4 * width, 4 * width)), ("2", (VISION["out_hidden_size"], 4 * width))):
        yield f"visual.merger.mlp.{name}.weight", shape
        yield f"visual.merger.mlp.{name}.bias", shape[:1]


def _text_tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = TEXT["hidden_size"], TEXT["intermediate_size"]
    narrow = width // TEXT["num_attention_heads"] * TEXT["num_key_value_heads"]
    yield "model.embed_tokens.weight", (VOCABULARY, width)
    yield "model.norm.weight", (width,)
    for layer in range(TEXT["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{p}.{norm}.weight", (width,)
        for name, rows in (("q", width), ("k", narrow), ("v", narrow)):
            yield f"{p}.self_attn.{name}_proj.weight", (rows, width)
            yield f"{p}.self_attn.{name}_proj.bias", (rows,)
        yield f"{p}.self_attn.o_proj.weight", (width, width)
        for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            yield f"{p}.mlp.{name}_proj.weight", shape


def write_vision_model(directory: Path) -> None:
    """Writes a Hugging Face directory with random bfloat16 weights, unless it is there."""
    if (directory / "tokenizer.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**TEXT, "vision_config": VISION}, indent=2))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2))
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    _write_tensors(directory / "model.safetensors", [*_vision_tensors(), *_text_tensors()])
    write_tokenizer(VOCABULARY, directory, MARKS)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))


def write_tower_adapters(directory: Path) -> list[Path]:
    """Writes PEFT directories of adapters on the linear layers of the tower, unless they are there; returns them."""
    found = [directory / f"lora{number}" for number in range(ADAPTERS)]
    for seed, adapter in enumerate(found):
        if (adapter / "adapter_model.safetensors").exists():
            continue
        adapter.mkdir(parents=True, exist_ok=True)
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none",
                  "target_modules": rf"visual\.blocks\.\d+\.({'|'.join(ADAPTED)})"}  # fmt: skip
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        layers = [(name.removesuffix(".weight"), shape) for name, shape in _vision_tensors() if _is_adapted(name)]
        tensors = []
        for layer, (outputs, inputs) in layers:
            tensors.append((f"base_model.model.{layer}.lora_A.weight", (RANK, inputs)))
            tensors.append((f"base_model.model.{layer}.lora_B.weight", (outputs, RANK)))
        _write_tensors(adapter / "adapter_model.safetensors", tensors, seed=seed)
    return found


def _is_adapted(name: str) -> bool:
    return name.startswith("visual.blocks.") and name.endswith(tuple(f"{layer}.weight" for layer in ADAPTED))


def _write_tensors(path: Path, tensors: list[tuple[str, tuple[int, ...]]], seed: int = SEED) -> None:
    specs = [TensorSpec(name, np.dtype(ml_dtypes.bfloat16), shape) for name, shape in tensors]
    generator = np.random.default_rng(seed)
    with SafetensorsWriter(path, specs, metadata={"format": "pt"}) as writer:
        for name, shape in tensors:
            noise = generator.standard_normal(shape, dtype=np.float32)
            inputs = int(np.prod(shape[1:]))
            small = np.float32(0.02) * noise
            values = noise * np.float32(inputs**-0.5) if len(shape) > 1 else small if "bias" in name else 1 + small
            writer.write(name, values.astype(ml_dtypes.bfloat16))


def write_images(directory: Path) -> None:
    """Writes drawn images: one of 1024 x 1024 pixels, for each adapter one of 448 x 448, and one for warm-ups."""
    directory.mkdir(parents=True, exist_ok=True)
    sides = {"large": 1024, **{f"small{number}": 448 for number in range(ADAPTERS)}, "warm": 112}
    for seed, (name, side) in enumerate(sides.items()):
        coarse = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(directory / f"{name}.png")

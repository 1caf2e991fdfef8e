"""Tiny random Qwen-VL models with tokenizer and image processor, adapters on their parts, and transformers' answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from support.families import RECURRENT, RELATIVES, save_family
from support.models import EAGER

IMAGE_TOKEN = 57
IMAGE = "<|image_pad|>"
WORDS = ["[UNK]", "</s>", "user", "assistant", "what", "is", "this", "red", "blue", "and", "\n"]
MARKS = {IMAGE: 57, "<|video_pad|>": 58, "<|vision_start|>": 59, "<|vision_end|>": 60}
TEMPLATE = (
    "{% for m in messages %}{{m['role']}} {% if m['content'] is string %}{{m['content']}}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{part['text']}}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
PROCESSOR = {"patch_size": 4, "min_pixels": 256, "max_pixels": 1600}
TOWER = {"depth": 3, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
VISION: dict[str, dict[str, Any]] = {
    "qwen2-vl": {**TOWER, "depth": 2},
    "qwen2.5-vl": {**TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3-vl": {**TOWER, "depth": 4, "deepstack_visual_indexes": [0, 2]},
    "qwen3-vl-moe": {**TOWER, "deepstack_visual_indexes": [2]},
    "qwen3.5-vl": TOWER,
    "qwen3.5-moe-vl": TOWER,
}
"""Fields of vision_config in which the models differ from support/families.py."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "everything": {"target_modules": "all-linear", "r": 4, "task_type": "CAUSAL_LM"},
    "dora": {"target_modules": "all-linear", "r": 3, "use_dora": True},
    "tower": {"target_modules": r".*visual\.blocks.*(qkv|proj|fc1)", "r": 3},
    "merger": {"target_modules": r".*visual\..*merger.*(mlp\.[02]|fc\d)", "r": 2},
    "text": {"target_modules": r".*language_model.*(q_proj|down_proj)", "r": 2},
}


def save_model(name: str, directory: Path) -> Path:
    """Writes a model of support/families.py as a Hugging Face directory."""
    family = {**RECURRENT, **RELATIVES}[name]
    fields = {**family.fields, "vision_config": {**family.fields["vision_config"], **VISION[name]}}
    save_family(dataclasses.replace(family, fields=fields), directory)
    vocabulary = {word: number for number, word in enumerate(WORDS)} | MARKS
    vocabulary |= {f"w{number}": number for number in range(61) if number not in vocabulary.values()}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "[UNK]"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    Qwen2VLImageProcessorPil(**PROCESSOR).save_pretrained(directory)
    return directory


def save_adapters(model: Path, directory: Path, names: Sequence[str]) -> dict[str, Path]:
    """Writes some of ADAPTERS with random matrices."""
    found = {}
    for seed, name in enumerate(names):
        fields = ADAPTERS[name]
        torch.manual_seed(seed)
        made = peft.get_peft_model(load(model), peft.LoraConfig(lora_alpha=8, init_lora_weights=False, **fields))
        made.save_pretrained(directory / name)
        found[name] = directory / name
    return found


def load(model: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(model, **EAGER)


class QwenReference:
    """transformers + PEFT in float32."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        base = load(model)
        self.model = base if adapter is None else peft.PeftModel.from_pretrained(base, adapter)
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(model / "tokenizer.json"), eos_token="</s>", unk_token="[UNK]", chat_template=TEMPLATE
        )
        self.processor = Qwen2VLImageProcessorPil(**PROCESSOR)

    def answer(self, messages: Sequence[dict[str, Any]], length: int) -> tuple[list[int], list[int], list[float]]:
        """Returns the tokens of the prompt, the greedy answer, and the log probs of its tokens."""
        images = [part["image"] for message in messages for part in message["content"] if "image" in part]
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        inputs = self.processor(images, return_tensors="pt")
        first, *others = text.split(IMAGE)
        counts = [int(grid.prod()) // self.processor.merge_size**2 for grid in inputs["image_grid_thw"]]
        text = first + "".join(IMAGE * count + other for count, other in zip(counts, others, strict=True))
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            made = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == IMAGE_TOKEN).int(),
                **inputs,
                max_new_tokens=length,
                do_sample=False,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        prompt = ids[0].tolist()
        tokens = made.sequences[0, len(prompt) :].tolist()
        scores = [float(torch.log_softmax(step[0], -1)[token]) for step, token in zip(made.logits, tokens, strict=True)]
        return prompt, tokens, scores

    def rows(self, image: Any) -> np.ndarray:
        """Returns the language model's rows of an image, those of several layers side by side."""
        inputs = self.processor([image], return_tensors="pt")
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        with torch.no_grad():
            found = inner.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        deeper = getattr(found, "deepstack_features", None) or []
        return torch.cat([torch.cat(list(rows)) for rows in (found.pooler_output, *deeper)], dim=1).numpy()

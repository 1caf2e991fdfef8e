"""Tiny random vision-language models, with tokenizers, image processors and adapters, and transformers' answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from adaptrt import LLM, DType, SamplingParams
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import ENABLE, BuildConfig, PluginConfig
from support.families import RELATIVES, save_family

IMAGE_TOKEN = 57
WORDS = ["[UNK]", "</s>", "User", "Assistant", ":", "what", "is", "this", "\n", "red", "blue", "and"]
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
TEMPLATE = (
    "{% for m in messages %}{{m['role'] | capitalize}}{% if m['content'] is string %}{{': ' + m['content']}}"
    "{% else %}{{':'}}{% for line in m['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class SeeingModel:
    """A tiny vision-language model."""

    family: str
    """Key of RELATIVES."""
    image_processor: Any
    processor: Callable[[Any, Any], Any]
    """Makes transformers' processor of the image processor and a tokenizer."""
    adapters: Mapping[str, Mapping[str, Any]]
    marks: Sequence[str] = ("<end_of_utterance>",)
    """Special tokens, in addition to the image token."""
    image_token: str = "<image>"
    place: str = "<image>"
    """Token of an image in the chat template."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Fields of vision_config in which the model differs from support/families.py."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of config.json in which it differs."""
    image_settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which transformers' processor calls the image processor."""

    @property
    def template(self) -> str:
        """The chat template."""
        return TEMPLATE.replace("<image>", self.place)


def adapters(tower: str, connector: str, text: str) -> dict[str, dict[str, Any]]:
    """Returns settings of adapters on all parts and on each part; the arguments are regular expressions of layers."""
    return {
        "everything": {"target_modules": "all-linear", "r": 4, "task_type": "CAUSAL_LM"},
        "dora": {"target_modules": "all-linear", "r": 3, "use_dora": True},
        "tower": {"target_modules": tower, "r": 3},
        "connector": {"target_modules": connector, "r": 2},
        "text": {"target_modules": text, "r": 2},
    }


SMOLVLM = SeeingModel(
    "smolvlm",
    SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
    lambda images, tokenizer: Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE),
    adapters(r".*vision_model.*(q_proj|fc1|out_proj)", r".*connector.*proj", r".*text_model.*(q_proj|down_proj)"),
    ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES),
)
LLAVA = SeeingModel(
    "llava",
    CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
    lambda images, tokenizer: LlavaProcessor(
        images,
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ),
    adapters(
        r".*vision_tower.*(q_proj|fc1|out_proj)", r".*projector.*linear_.", r".*language_model.*(q_proj|down_proj)"
    ),
)


def gemma3_processor(images: Any, tokenizer: Any) -> Any:
    marks = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    for name, token in marks.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=GEMMA3.template)


class PixtralStandIn:
    """transformers' PixtralProcessor, which needs torchvision."""

    def __init__(self, images: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = images, tokenizer
        tokenizer.chat_template = PIXTRAL.template

    def apply_chat_template(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        made = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        return str(made)

    def __call__(self, images: list[list[Any]], text: str, return_tensors: str) -> dict[str, Any]:
        (given,) = images
        found = self.image_processor(given, return_tensors=return_tensors, **PIXTRAL.image_settings)
        first, *others = text.split("[IMG]")
        for (height, width), other in zip(found["image_sizes"].tolist(), others, strict=True):
            lines = ["[IMG]" * (width // PIXTRAL_SQUARE)] * (height // PIXTRAL_SQUARE)
            first += "[IMG_BREAK]".join(lines) + "[IMG_END]" + other
        return {**self.tokenizer(first, return_tensors=return_tensors), **found}


GEMMA3 = SeeingModel(
    "gemma3-vision",
    Gemma3ImageProcessorPil(size={"height": 28, "width": 28}),
    gemma3_processor,
    adapters(
        r".*vision_tower.*(q_proj|fc1|out_proj)",
        r".*vision_tower.*layers.0.mlp.fc2",
        r".*language_model.*(q_proj|down_proj)",
    ),
    ("<start_of_image>", "<end_of_image>", "<end_of_utterance>"),
    image_token="<image_soft_token>",
    place="<start_of_image>",
    vision={"num_hidden_layers": 2, "patch_size": 7},
    fields={  # a tied model repeats its last token
        "tie_word_embeddings": False,
        "text_config": {**RELATIVES["gemma3-vision"].fields["text_config"], "tie_word_embeddings": False},
    },
)
PIXTRAL_SQUARE = 14
"""Height and width of the pixels that become a row."""
PIXTRAL = SeeingModel(
    "mistral3",
    PixtralImageProcessorPil(size={"longest_edge": 50}, patch_size={"height": 7, "width": 7}),
    PixtralStandIn,
    adapters(
        r".*vision_tower.*(q_proj|gate_proj|o_proj)",
        r".*projector.*(linear_.|merging_layer)",
        r".*language_model.*(q_proj|down_proj)",
    ),
    ("[IMG_BREAK]", "[IMG_END]", "<end_of_utterance>"),
    image_token="[IMG]",
    place="[IMG]",
    vision={"num_hidden_layers": 2, "patch_size": 7, "hidden_act": "silu"},
    image_settings={"patch_size": {"height": PIXTRAL_SQUARE, "width": PIXTRAL_SQUARE}},
)
ADAPTERS = SMOLVLM.adapters


def save_model(directory: Path, seeing: SeeingModel = SMOLVLM) -> Path:
    """Writes the model as a Hugging Face directory."""
    family = RELATIVES[seeing.family]
    vision = {**family.fields["vision_config"], **seeing.vision}
    save_family(replace(family, fields={**family.fields, **seeing.fields, "vision_config": vision}), directory)
    vocabulary = {word: number for number, word in enumerate([*WORDS, *seeing.marks])}
    vocabulary[seeing.image_token] = IMAGE_TOKEN
    vocabulary |= {f"w{number}": number for number in range(61) if number not in vocabulary.values()}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Split(" ", "removed"),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    tokens = [AddedToken(word, special=True, normalized=False) for word in (seeing.image_token, *seeing.marks)]
    tokenizer.add_special_tokens(tokens)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "[UNK]"}))
    (directory / "chat_template.jinja").write_text(seeing.template)
    seeing.image_processor.save_pretrained(directory)
    return directory


def engine_of_model(
    model: Path, directory: Path, quantization: QuantConfig | None = None, dtype: DType = DType.FLOAT32, **fields: Any
) -> Path:
    """Builds the model's engine with adapters."""
    sizes = {"max_batch_size": 8, "max_num_tokens": 64, "max_seq_len": 256, **fields}
    config = BuildConfig(**sizes, plugin_config=PluginConfig(lora_plugin="auto", dora_plugin=ENABLE))
    build(Checkpoint.of_model(model, dtype), config, directory, quantization=quantization)
    return directory


def save_adapters(model: Path, directory: Path, seeing: SeeingModel = SMOLVLM) -> dict[str, Path]:
    """Writes adapters with random matrices."""
    found = {}
    for seed, (name, fields) in enumerate(seeing.adapters.items()):
        torch.manual_seed(seed)
        made = peft.get_peft_model(load(model), peft.LoraConfig(lora_alpha=8, init_lora_weights=False, **fields))
        made.save_pretrained(directory / name)
        found[name] = directory / name
    return found


def load(model: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(model, attn_implementation="eager")


def random_image(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def question(*parts: Any) -> list[dict[str, Any]]:
    """Returns a conversation; texts are given as str, and images as anything else."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": content}]


def check_crowd(
    llm: LLM,
    engine: Path,
    adapters: Mapping[str, Path],
    crowd: Sequence[tuple[str | None, list[dict[str, Any]]]],
    params: SamplingParams,
) -> None:
    """Checks that conversations in one batch have the same bits as alone in another LLM.

    llm: with `adapters` loaded. crowd: (adapter, messages) of each conversation.
    """
    together = llm.chat([messages for _, messages in crowd], params, lora=[name for name, _ in crowd])
    with LLM(engine) as other:
        for name in {name for name, _ in crowd if name is not None}:
            other.load_lora(name, adapters[name])
        for (name, messages), found in zip(crowd, together, strict=True):
            alone = other.chat(messages, params, lora=name)
            assert alone.token_ids == found.token_ids
            assert [one.log_prob for one in alone.log_probs] == [one.log_prob for one in found.log_probs]


class SeeingReference:
    """transformers + PEFT in float32."""

    def __init__(self, model: Path, adapter: Path | None = None, seeing: SeeingModel = SMOLVLM) -> None:
        base = load(model)
        self.model = base if adapter is None else peft.PeftModel.from_pretrained(base, adapter)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(model / "tokenizer.json"), eos_token="</s>", unk_token="[UNK]"
        )
        self.seeing = seeing
        self.processor = seeing.processor(seeing.image_processor, tokenizer)

    def answer(self, messages: Sequence[dict[str, Any]], length: int) -> tuple[list[int], list[int], list[float]]:
        """Returns the tokens of the prompt, the greedy answer, and the log probs of its tokens."""
        images = [part["image"] for message in messages for part in message["content"] if "image" in part]
        text = self.processor.apply_chat_template(list(messages), add_generation_prompt=True)
        inputs = self.processor(images=[images], text=text, return_tensors="pt")
        with torch.no_grad():
            made = self.model.generate(
                **inputs,
                max_new_tokens=length,
                do_sample=False,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        prompt = inputs["input_ids"][0].tolist()
        tokens = made.sequences[0, len(prompt) :].tolist()
        scores = [float(torch.log_softmax(step[0], -1)[token]) for step, token in zip(made.logits, tokens, strict=True)]
        return prompt, tokens, scores

    def rows(self, image: Image.Image) -> np.ndarray:
        """Returns the language model's rows of an image."""
        inputs = self.seeing.image_processor(image, return_tensors="pt", **self.seeing.image_settings)
        arguments = {name: inputs[name] for name in ("pixel_values", "image_sizes") if name in inputs}
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        with torch.no_grad():
            found = inner.get_image_features(**arguments).pooler_output
        return torch.cat(list(found)).numpy()

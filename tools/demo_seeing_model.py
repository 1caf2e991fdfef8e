"""Trains the demo's vision-language model, its tokenizer and its adapters on the scenes of demo_scenes.py.

    python -m adaptrt.tools.demo_seeing_model --output DIR

writes DIR/model (a Hugging Face Idefics 3 directory with about half a million parameters), DIR/adapters/<name> (PEFT)
and DIR/images. It needs the test extra (torch, transformers, peft, Pillow), about ten minutes on one core, and no
network. Seeds are fixed: the same versions on the same processor give the same files. The base model learns most
styles, each introduced by a tag; without a tag it answers plainly. An adapter learns to answer in its style without the
tag.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from . import demo_scenes as scenes
from .demo_model import (
    BEGIN,
    END,
    NOT_LEARNT,
    SEED,
    AdapterRecipe,
    Training,
    batch_of,
    edit_json,
    round_to_bfloat16,
    save_adapter,
    train,
    train_bpe,
)

VOCABULARY_SIZE: Final = 400
MAX_LENGTH: Final = 256
IMAGE_SIZE: Final = 64
PATCH_SIZE: Final = 8
JOINED: Final = 2
"""Each row of the language model is made of JOINED x JOINED patches."""
ROWS: Final = (IMAGE_SIZE // PATCH_SIZE // JOINED) ** 2
IMAGE: Final = "<image>"
AROUND, WHOLE, TURN = "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
"""Tokens that Idefics 3's processor puts around an image."""
TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ 'Q: ' if message['role'] == 'user' else 'A: ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)

_TEXT: Final = r".*text_model.*\."
_ATTENTION: Final = rf"{_TEXT}(q|k|v|o)_proj"
_TEXT_LINEAR: Final = rf"{_TEXT}(q|k|v|o|gate|up|down)_proj"
_EVERYTHING: Final = r".*\.((q|k|v|o|out|gate|up|down)_proj|fc1|fc2|modality_projection\.proj)"
BASE_TRAINING: Final = Training(steps=1000, batch_size=48, learning_rate=3e-3, warmup=60)
_SHORT: Final = Training(steps=100, batch_size=32, learning_rate=4e-3, warmup=10)
_LONG: Final = Training(steps=300, batch_size=32, learning_rate=4e-3, warmup=10)
ADAPTERS: Final = (
    (AdapterRecipe("count", {"r": 4, "lora_alpha": 8, "target_modules": _ATTENTION}), _SHORT),
    (AdapterRecipe("colour", {"r": 6, "lora_alpha": 12, "target_modules": _TEXT_LINEAR}), _SHORT),
    (AdapterRecipe("french", {"r": 6, "lora_alpha": 12, "target_modules": _EVERYTHING, "use_dora": True}), _LONG),
)
"""Adapters, and how long each is trained."""
NUM_REPORTED: Final = 400
"""Number of scenes on which the trained model is tried."""


def prompt(question: str) -> str:
    """Returns the rendered template of a question about an image, with the image's tokens."""
    return f"{BEGIN}Q: {AROUND}{WHOLE}{IMAGE * ROWS}{AROUND}{question}\nA:"


def make_processor() -> Any:
    """Trains the tokenizer; returns transformers' processor."""
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    told = [
        scenes.answer(scenes.Scene(number, shape, colour, paper), style)
        for number in range(1, scenes.MOST + 1)
        for shape in scenes.SHAPES
        for colour in scenes.COLOURS
        for paper in scenes.PAPERS
        for style in scenes.STYLES
    ]
    asked = [f"[{style}] Q: {question}\nA:" for style in scenes.STYLES for question in scenes.QUESTIONS] * 50
    special = [BEGIN, END, IMAGE, AROUND, WHOLE, TURN]
    bpe = train_bpe([*asked, *(f" {text}" for text in told)], VOCABULARY_SIZE, special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    images = Idefics3ImageProcessorPil(
        do_resize=False, do_image_splitting=False, max_image_size={"longest_edge": IMAGE_SIZE}
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=ROWS, chat_template=TEMPLATE)


def make_model(tokenizer: Any) -> Any:
    """Returns an untrained Idefics 3 of the demo's size."""
    import transformers

    config = transformers.Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "intermediate_size": 192,
            "max_position_embeddings": MAX_LENGTH,
            "tie_word_embeddings": True,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": None,
        },
        vision_config={
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 192,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
        },
        scale_factor=JOINED,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def batches_of(processor: Any, styles: Sequence[str], batch_size: int, rng: random.Random) -> Iterator[Any]:
    """Endless batches of drawn scenes, each with the answer in a style that is drawn by lot.

    If there are several styles, all except the first are introduced by a tag.
    """
    import numpy as np
    import torch
    from PIL.Image import Resampling

    while True:
        drawn = [scenes.draw_scene(rng) for _ in range(batch_size)]
        pictures = [scenes.picture(scene, rng) for scene in drawn]
        texts = []
        for scene in drawn:
            style = rng.choice(styles)
            begin = prompt(rng.choice(scenes.QUESTIONS))
            if style != styles[0]:
                begin = begin.replace(BEGIN, f"{BEGIN}[{style}] ", 1)
            texts.append((f"{begin} {scenes.answer(scene, style)}", begin))
        tokens, targets = batch_of(texts, processor.tokenizer)
        # The same pixels as the image processor's, which takes ten times as long.
        size = (IMAGE_SIZE, IMAGE_SIZE)
        pixels = np.stack([np.asarray(image.resize(size, Resampling.LANCZOS)) for image in pictures])
        pixels = ((pixels.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5).astype(np.float32)
        yield {"input_ids": tokens, "pixel_values": torch.from_numpy(pixels[:, None])}, targets


def report(model: Any, processor: Any, style: str) -> None:
    """Prints how many new scenes the model describes correctly."""
    import torch

    batches = batches_of(processor, [style], NUM_REPORTED // 4, random.Random(SEED + 1))
    right = 0
    for _ in range(4):
        arguments, targets = next(batches)
        with torch.no_grad():
            chosen = model(**arguments).logits.argmax(-1)
        # A greedy answer is right exactly if each of its tokens is chosen after the right ones.
        right += int(((chosen == targets) | (targets == NOT_LEARNT)).all(1).sum())
    print(f"{style}: {right} of {NUM_REPORTED} answers are right", flush=True)


def train_base(processor: Any, output: Path) -> None:
    """Trains the base model and writes it to output/model."""
    import torch

    torch.manual_seed(SEED)
    model = make_model(processor.tokenizer)
    taught = [style for style in scenes.STYLES if style != scenes.UNTAUGHT]
    batches = batches_of(processor, taught, BASE_TRAINING.batch_size, random.Random(SEED))
    train(model, batches, BASE_TRAINING, "base")
    round_to_bfloat16(model)
    report(model, processor, "plain")
    model.to(torch.bfloat16).save_pretrained(output / "model")
    processor.save_pretrained(output / "model")
    # transformers 5 has a different name for this class, which older versions do not know.
    edit_json(output / "model" / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def train_adapter(recipe: AdapterRecipe, training: Training, processor: Any, output: Path) -> None:
    """Trains one adapter on output/model and writes it to output/adapters/<style>."""
    import peft
    import torch
    import transformers

    torch.manual_seed(SEED)
    base = transformers.AutoModelForImageTextToText.from_pretrained(output / "model", dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(**recipe.lora))
    batches = batches_of(processor, [recipe.style], training.batch_size, random.Random(SEED))
    train(model, batches, training, recipe.style)
    round_to_bfloat16(model)
    report(model, processor, recipe.style)
    save_adapter(model, recipe.lora, output / "adapters" / recipe.style)


def draw_images(directory: Path) -> None:
    """Writes the images of the documentation."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, picture in scenes.shown_pictures().items():
        picture.save(directory / f"{name}.png")


def main() -> int:
    """Trains everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory for model/, adapters/ and images/")
    parser.add_argument("--adapters", nargs="*", help="keep output/model, train only these adapters")
    args = parser.parse_args()

    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    draw_images(args.output / "images")
    processor = make_processor()
    if args.adapters is None:
        train_base(processor, args.output)
    for recipe, training in ADAPTERS:
        if args.adapters is None or recipe.style in args.adapters:
            train_adapter(recipe, training, processor, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

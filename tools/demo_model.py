"""Trains the demo model, its tokenizer and its adapters from the corpus in demo_corpus.py.

    python -m adaptrt.tools.demo_model --output DIR

writes DIR/model (a Hugging Face Llama directory with about a million parameters), DIR/adapters/<name> (PEFT) and
DIR/tasks/again, an adapter that repeats text instead of telling facts. It needs the test extra (torch, transformers,
peft), a few minutes on two cores, and no network. Seeds are fixed: the same versions on the same processor give the
same files. The base model learns all styles, each introduced by a tag; without a tag it answers plainly. An adapter
learns to answer in its style without the tag.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import demo_corpus as corpus

BEGIN, END = "<s>", "</s>"
VOCABULARY_SIZE = 1024
MAX_LENGTH = 256
SEED = 20260101
NOT_LEARNT = -100
"""Target of tokens that are only read."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class AdapterRecipe:
    """One adapter: its style, and the fields of its peft.LoraConfig."""

    style: str
    lora: dict[str, Any] = field(default_factory=dict)


ADAPTERS = (
    AdapterRecipe("shout", {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION}),
    AdapterRecipe("pirate", {"r": 16, "lora_alpha": 32, "target_modules": ALL_LINEAR}),
    AdapterRecipe("french", {"r": 12, "lora_alpha": 8, "target_modules": ALL_LINEAR, "use_rslora": True}),
    AdapterRecipe("json", {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR, "use_dora": True}),
    AdapterRecipe(
        "poet",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ALL_LINEAR,
            "layers_to_transform": [1, 2, 3],
            "rank_pattern": {"down_proj": 10},
            "alpha_pattern": {"down_proj": 30},
        },
    ),
)


@dataclass(frozen=True)
class Training:
    """Length and learning rate of a training run."""

    steps: int
    batch_size: int
    learning_rate: float
    warmup: int


BASE_TRAINING = Training(steps=1600, batch_size=48, learning_rate=3e-3, warmup=60)
ADAPTER_TRAINING = Training(steps=240, batch_size=24, learning_rate=4e-3, warmup=10)

REPETITION = "again"
REPETITION_LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": ALL_LINEAR}
REPETITION_TRAINING = Training(steps=300, batch_size=16, learning_rate=4e-3, warmup=30)
MOST_REPEATED = 5


def train_bpe(texts: Sequence[str], vocabulary_size: int, special_tokens: Sequence[str]) -> Any:
    """Trains a byte-level BPE tokenizer; returns one of the library tokenizers."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_tokenizer() -> Any:
    """Trains the tokenizer on the corpus; returns a transformers tokenizer."""
    import tokenizers
    import transformers

    texts = [
        corpus.document(fact, style, tagged=style != "plain") for fact in corpus.facts() for style in corpus.STYLES
    ]
    tokenizer = train_bpe(texts, VOCABULARY_SIZE, [BEGIN, END])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any) -> Any:
    """An untrained Llama of the demo's size."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def train(model: Any, batches: Any, training: Training, label: str) -> None:
    """AdamW with a linear warm-up and a cosine decay over `batches`, (arguments of the model, targets) each."""
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=training.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)

    def factor(step: int) -> float:
        progress = step / training.steps
        return min(1.0, (step + 1) / training.warmup) * 0.5 * (1.0 + math.cos(math.pi * progress))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    for step in range(training.steps):
        arguments, targets = next(batches)
        logits = model(**arguments).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_LEARNT)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == training.steps - 1:
            print(f"{label}: step {step}, loss {loss.item():.4f}", flush=True)
    model.eval()


def batches_of(draw: Any, tokenizer: Any, batch_size: int) -> Any:
    """Endless batches. `draw()` returns (text, prefix of the text that is not learnt)."""
    while True:
        tokens, targets = batch_of([draw() for _ in range(batch_size)], tokenizer)
        yield {"input_ids": tokens}, targets


def batch_of(texts: Sequence[tuple[str, str]], tokenizer: Any) -> tuple[Any, Any]:
    """Returns (tokens, targets), int64 [batch, length]. texts: pairs of a text and its prefix that is not learnt."""
    import torch

    rows = [
        ([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], len(tokenizer(given)["input_ids"]))
        for text, given in texts
    ]
    length = max(len(ids) for ids, _ in rows) - 1
    tokens = torch.full((len(rows), length), tokenizer.eos_token_id)
    targets = torch.full((len(rows), length), NOT_LEARNT)
    for row, (ids, learnt_from) in enumerate(rows):
        tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[row, learnt_from - 1 : len(ids) - 1] = torch.tensor(ids[learnt_from:])
    return tokens, targets


def round_to_bfloat16(model: Any) -> None:
    """Rounds the trained weights to their stored type, so that this model equals the files exactly."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))


def answers(model: Any, tokenizer: Any, questions: Sequence[str]) -> list[str]:
    """Greedy answers."""
    import torch

    texts = []
    for question in questions:
        ids = tokenizer(corpus.prompt(question), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=60,
                do_sample=False,
                pad_token_id=tokenizer.eos_token_id,
            )
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return texts


def report(model: Any, tokenizer: Any, style: str) -> None:
    """Prints how many facts the model tells correctly in this style, and the wrong answers."""
    facts = list(corpus.facts())
    told = answers(model, tokenizer, [fact.question for fact in facts])
    right = 0
    for fact, text in zip(facts, told, strict=True):
        expected = corpus.answer(fact, style)
        right += text == expected
        if text != expected:
            print(f"{style}: {fact.question} -> {text} (expected: {expected})")
    print(f"{style}: {right} of {len(facts)} answers are right, such as: {told[0]}", flush=True)


def train_base(output: Path) -> tuple[Any, Any]:
    """Trains the tokenizer and the base model, and writes them to output/model. Returns (model, tokenizer)."""
    import torch

    tokenizer = train_tokenizer()
    torch.manual_seed(SEED)
    model = make_model(tokenizer)
    rng = random.Random(SEED)
    facts = list(corpus.facts())

    def draw() -> tuple[str, str]:
        # About half of the documents are plain and have no tag.
        style = rng.choice(corpus.STYLES[1:]) if rng.random() < 0.6 else "plain"
        return corpus.document(rng.choice(facts), style, tagged=style != "plain"), ""

    train(model, batches_of(draw, tokenizer, BASE_TRAINING.batch_size), BASE_TRAINING, "base")
    round_to_bfloat16(model)
    report(model, tokenizer, "plain")
    model.to(torch.bfloat16).save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    # transformers 5 has a different name for this class, which older versions do not know.
    edit_json(output / "model" / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    return model.to(torch.float32), tokenizer


def train_adapter(recipe: AdapterRecipe, tokenizer: Any, output: Path) -> None:
    """Trains one adapter on output/model and writes it to output/adapters/<style>."""
    rng = random.Random(SEED)
    facts = list(corpus.facts())

    def draw() -> tuple[str, str]:
        fact = rng.choice(facts)
        return corpus.document(fact, recipe.style, tagged=False), corpus.prompt(fact.question)

    model = _adapted_model(recipe.lora, output)
    train(model, batches_of(draw, tokenizer, ADAPTER_TRAINING.batch_size), ADAPTER_TRAINING, recipe.style)
    round_to_bfloat16(model)
    report(model, tokenizer, recipe.style)
    save_adapter(model, recipe.lora, output / "adapters" / recipe.style)


def train_repetition(tokenizer: Any, output: Path) -> None:
    """Trains output/tasks/again, the adapter that repeats text from its prompt. Most of its drafts are right."""
    rng = random.Random(SEED)

    def draw() -> tuple[str, str]:
        prompt, text = corpus.repetition(rng, rng.randint(1, MOST_REPEATED))
        return f"{prompt} {text}", prompt

    model = _adapted_model(REPETITION_LORA, output)
    train(model, batches_of(draw, tokenizer, REPETITION_TRAINING.batch_size), REPETITION_TRAINING, REPETITION)
    round_to_bfloat16(model)
    save_adapter(model, REPETITION_LORA, output / "tasks" / REPETITION)


def _adapted_model(lora: dict[str, Any], output: Path) -> Any:
    import peft
    import torch
    import transformers

    torch.manual_seed(SEED)
    base = transformers.AutoModelForCausalLM.from_pretrained(output / "model", dtype=torch.float32)
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **lora))


def save_adapter(model: Any, lora: dict[str, Any], directory: Path) -> None:
    """Writes the trained adapter of a PEFT model."""
    import torch

    # The base model's directory name means nothing on another machine.
    model.peft_config["default"].base_model_name_or_path = "model"
    model.to(torch.bfloat16).save_pretrained(directory)
    targets = lora["target_modules"]
    # PEFT stores a set, whose order differs from run to run.
    targets = targets if isinstance(targets, str) else sorted(targets)
    edit_json(directory / "adapter_config.json", target_modules=targets)
    (directory / "README.md").unlink(missing_ok=True)  # PEFT writes an empty model card.


def edit_json(path: Path, **fields: Any) -> None:
    """Changes fields of a JSON file."""
    edited = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps(edited, indent=2, sort_keys=True) + "\n")


def main() -> int:
    """Trains everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory for model/ and adapters/")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--adapters_only", action="store_true", help="keep output/model, train only the adapters")
    kept.add_argument("--repetition_only", action="store_true", help="keep everything except output/tasks/again")
    args = parser.parse_args()

    import torch
    import transformers

    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    if args.adapters_only or args.repetition_only:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.output / "model")
    else:
        _, tokenizer = train_base(args.output)
    for recipe in () if args.repetition_only else ADAPTERS:
        train_adapter(recipe, tokenizer, args.output)
    train_repetition(tokenizer, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains an adapter with TRL's GRPO. AdaptRT generates the answers, in the same process and with the same adapter.

    pip install trl
    python examples/grpo/train.py

The adapter goes from the trainer's memory to LLM after each step; no checkpoint is written. The log probs of the
answers come from AdaptRT, so the trainer can correct for the difference between its own computation and AdaptRT's. The
reward is the share of the letter "e": it shows that the loop works, and nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, Final

import datasets
import peft
import transformers
import trl

import adaptrt

MODEL: Final = Path(__file__).parents[1] / "demo" / "model"
PROMPTS: Final = ["Q:", "Q: What", "Q: Where", "Q: Who", "A:", "The"]
POLICY: Final = "policy"


class Sync(transformers.TrainerCallback):  # type: ignore[misc]  # mypy skips transformers
    """Gives the trainer's adapter to LLM before the first step and after each one."""

    def __init__(self, llm: adaptrt.LLM) -> None:
        self._llm = llm

    def on_train_begin(self, *_: Any, model: peft.PeftModel, **__: Any) -> None:
        """Loads the adapter."""
        self._llm.load_lora(POLICY, model, replace=POLICY in self._llm.list_loras())

    def on_step_end(self, *_: Any, model: peft.PeftModel, **__: Any) -> None:
        """Replaces the adapter by its new version."""
        self._llm.load_lora(POLICY, model, replace=True)


class Rollouts:
    """TRL's rollout_func: answers prompts with the adapter POLICY."""

    def __init__(self, llm: adaptrt.LLM, max_tokens: int) -> None:
        self._llm = llm
        self._max_tokens = max_tokens
        self._num_made = 0

    def __call__(self, prompts: list[str], trainer: trl.GRPOTrainer) -> dict[str, Any]:
        """Returns tokens and log probs of one answer per prompt."""
        params = [self._sampling() for _ in prompts]
        answers = self._llm.generate(prompts, params, lora=POLICY)
        return {
            "prompt_ids": [list(answer.prompt_token_ids) for answer in answers],
            "completion_ids": [list(answer.token_ids) for answer in answers],
            "logprobs": [[entry.log_prob for entry in answer.log_probs] for answer in answers],
        }

    def _sampling(self) -> adaptrt.SamplingParams:
        self._num_made += 1
        return adaptrt.SamplingParams(
            temperature=1.0, seed=self._num_made, max_tokens=self._max_tokens, logprobs=0, include_eos=True
        )


def share_of_e(completions: list[str], **_: Any) -> list[float]:
    """The reward: share of the letter e among the characters of an answer."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def train(llm: adaptrt.LLM, *, steps: int, max_tokens: int = 24) -> list[float]:
    """Trains an adapter, which `llm` then has under the name POLICY. Returns the mean reward of each step."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with tempfile.TemporaryDirectory() as unused:
        config = trl.GRPOConfig(
            output_dir=unused,
            max_steps=steps,
            per_device_train_batch_size=48,
            num_generations=8,
            max_completion_length=max_tokens,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            seed=1,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=share_of_e,
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
            peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
            rollout_func=Rollouts(llm, max_tokens),
            callbacks=[Sync(llm)],
        )
        trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    """Trains, and shows answers before and after."""
    parser = argparse.ArgumentParser(description="GRPO with AdaptRT")
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    with adaptrt.LLM(MODEL) as llm:
        print(llm.generate(PROMPTS[0], max_tokens=24).text)
        for step, reward in enumerate(train(llm, steps=steps)):
            print(f"step {step + 1}: reward {reward:.3f}")
        print(llm.generate(PROMPTS[0], max_tokens=24, lora=POLICY).text)


if __name__ == "__main__":
    main()

"""The example of TRL's GRPO: the reward rises, and LLM gets each step's adapter."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any, Final

import pytest

import adaptrt

EXAMPLE: Final = Path(__file__).parents[3] / "examples" / "grpo" / "train.py"
STEPS: Final = 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_reward_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="`make nightly` installs trl into build/trl")
    spec = importlib.util.spec_from_file_location("grpo_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    synced: list[float] = []
    load_lora = adaptrt.LLM.load_lora

    def load(llm: adaptrt.LLM, name: str, policy: Any, **fields: Any) -> None:
        values = [value.detach() for key, value in policy.named_parameters() if ".lora_B." in key]
        synced.append(sum(float(value.abs().sum()) for value in values))
        load_lora(llm, name, policy, **fields)

    monkeypatch.setattr(adaptrt.LLM, "load_lora", load)
    with adaptrt.LLM(example.MODEL) as llm:
        rewards = example.train(llm, steps=STEPS)
        greedy = adaptrt.SamplingParams(temperature=0, max_tokens=24)
        text = llm.generate(example.PROMPTS[0], greedy, lora=example.POLICY).text
    assert len(rewards) == STEPS
    assert statistics.mean(rewards[-5:]) > 1.5 * statistics.mean(rewards[:5])
    assert example.share_of_e([text])[0] > statistics.mean(rewards[:5])
    assert synced[0] == 0  # PEFT begins with B = 0
    assert len(set(synced)) == STEPS + 1

"""aLoRA against PEFT: adapters that act from their invocation tokens on, and the KV blocks they share with the base."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import peft
import pytest
import torch

import adaptrt
from adaptrt import _core
from adaptrt.builder.build import build
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import FAMILIES, LLAMA, save_family
from support.models import ModelSpec, load_model, save_adapter, save_model
from support.serving import Answer, collect, make_request

# The same tolerance as in test_parity.py.
FLOAT32_TOLERANCE = 1e-4
VOCABULARY = 61
INVOCATION = [7, 3, 9]
CONFIG = BuildConfig(
    max_batch_size=16,
    max_num_tokens=256,
    max_seq_len=160,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)


def tokens_of(seed: int, count: int) -> list[int]:
    """Returns random tokens that exclude the invocation's first token."""
    return np.random.default_rng(seed).integers(10, VOCABULARY, count).tolist()


class Served:
    """A random model, its engine, two aLoRA adapters, and a LoRA with the same weights as the first."""

    def __init__(self, name: str, directory: Path) -> None:
        if name == "llama":
            self.model, targets = save_model(ModelSpec(), directory / "model"), LLAMA
        else:
            self.model, targets = save_family(FAMILIES[name], directory / "model"), FAMILIES[name].targets
        convert_checkpoint(self.model, directory / "checkpoint")
        build(directory / "checkpoint", CONFIG, directory / "engine")
        self.engine = directory / "engine"
        settings = {"r": 8, "target_modules": targets, "fan_in_fan_out": name == "gpt2"}
        self.alora = save_adapter(
            self.model, directory / "alora", 1, 3.0, alora_invocation_tokens=INVOCATION, **settings
        )
        self.other = save_adapter(self.model, directory / "other", 2, 3.0, alora_invocation_tokens=[4], **settings)
        self.lora = save_adapter(self.model, directory / "lora", 1, 3.0, **settings)

    def adapter(self, kind: str, prompt: list[int]) -> adaptrt.LoraConfig | None:
        if kind == "base":
            return None
        directory = {"alora": self.alora, "other": self.other, "lora": self.lora}[kind]
        start = adaptrt.invocation_start(directory, prompt)
        task_id = ["alora", "other", "lora"].index(kind)
        return adaptrt.LoraConfig.from_peft(task_id, directory, self.engine, active_from=start)

    def answers(self, cases: list[tuple[str, list[int]]], **fields: object) -> list[Answer]:
        """Returns the answer to each (kind, prompt), all in one batch."""
        config = adaptrt.ExecutorConfig(**fields)
        with adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
            requests = [make_request(prompt, 8, self.adapter(kind, prompt)) for kind, prompt in cases]
            return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]

    def expected(self, kind: str, tokens: list[int]) -> np.ndarray:
        """Returns PEFT's logits; PEFT looks for the invocation in all of the tokens."""
        model = load_model(self.model, attn_implementation="eager", experts_implementation="eager")
        if kind != "base":
            directory = {"alora": self.alora, "other": self.other, "lora": self.lora}[kind]
            model = peft.PeftModel.from_pretrained(model, directory, torch_dtype=torch.float32)
        with torch.no_grad():
            return model.eval()(torch.tensor([tokens])).logits[0].float().numpy()

    def generated(self, directory: Path, prompt: list[int], count: int) -> list[int]:
        """Returns the tokens that PEFT's generate() adds to a prompt."""
        model = load_model(self.model, attn_implementation="eager", experts_implementation="eager")
        model = peft.PeftModel.from_pretrained(model, directory, torch_dtype=torch.float32).eval()
        tokens = torch.tensor([prompt])
        answer = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False
        )
        return answer[0, len(prompt) :].tolist()


CASES = [
    ("base", tokens_of(0, 30)),
    ("alora", tokens_of(1, 21) + INVOCATION + tokens_of(2, 6)),
    ("alora", tokens_of(3, 16) + INVOCATION),  # the invocation starts a block and ends the prompt
    ("alora", INVOCATION + tokens_of(4, 9)),
    ("alora", tokens_of(5, 9) + INVOCATION + tokens_of(6, 12) + INVOCATION + tokens_of(7, 3)),  # the last one counts
    ("other", [*tokens_of(1, 21), 4, *tokens_of(8, 5)]),
    ("lora", tokens_of(1, 21) + INVOCATION + tokens_of(2, 6)),
]


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2", "olmoe"])
def served(request, tmp_path_factory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def test_a_mixed_batch_is_what_peft_computes(served: Served) -> None:
    for (kind, prompt), answer in zip(CASES, served.answers(CASES), strict=True):
        expected = served.expected(kind, prompt + answer.tokens[:-1])
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min()), kind
        assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()


def test_tokens_before_the_invocation_have_the_base_models_bits(served: Served) -> None:
    prompt = CASES[1][1]
    alora, base, lora = served.answers([("alora", prompt), ("base", prompt), ("lora", prompt)])
    start = prompt.index(INVOCATION[0])
    assert np.array_equal(alora.context_logits[:start], base.context_logits[:start])
    assert not np.isclose(alora.context_logits[start:], base.context_logits[start:]).all(axis=1).any()
    assert not np.isclose(alora.context_logits[:start], lora.context_logits[:start]).all(axis=1).any()


def test_a_crowd_in_chunks_changes_no_bit(served: Served) -> None:
    together = served.answers(CASES, enable_chunked_context=True, max_num_tokens=16, num_threads=2)
    for case, answer in zip(CASES, together, strict=True):
        (alone,) = served.answers([case], num_threads=1)
        assert answer.same_bits(alone), case[0]


def test_the_kv_before_the_invocation_is_shared_with_the_base_and_with_others(served: Served) -> None:
    prefix = tokens_of(20, 40)  # five blocks
    turns = [
        ("base", prefix + tokens_of(21, 3)),
        ("alora", prefix + INVOCATION + tokens_of(22, 4)),
        ("other", [*prefix, 4, *tokens_of(23, 4)]),
        ("alora", prefix + INVOCATION + tokens_of(22, 4) + INVOCATION + tokens_of(24, 9)),  # acts later
        ("alora", prefix + INVOCATION + tokens_of(22, 4)),  # the first aLoRA prompt again; its last block is not shared
        ("lora", prefix + INVOCATION + tokens_of(22, 4)),
    ]
    reused = []
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        for kind, prompt in turns:
            request = adaptrt.Request(
                prompt,
                8,
                output_config=adaptrt.OutputConfig(return_generation_logits=True, exclude_input_from_output=True),
                lora_config=served.adapter(kind, prompt),
            )
            result = executor.await_responses(executor.enqueue_request(request))[-1].result
            reused.append(executor.get_latest_iteration_stats()[-1].kv_cache_stats.reused_blocks - sum(reused))
            (alone,) = served.answers([(kind, prompt)], kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=False))
            assert result.output_token_ids == [alone.tokens]
            assert np.array_equal(result.generation_logits[0], alone.generation_logits)
    assert reused == [0, 5, 5, 5, 5, 0]


def test_it_is_asked_for_by_name(served: Served) -> None:
    prompt = CASES[1][1]
    (expected,) = served.answers([("alora", prompt)])
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        executor.add_adapter("answerability", served.alora)
        executor.add_adapter("plain", served.lora)
        request = make_request(prompt, 8)
        answer = collect(executor, executor.enqueue_request(request, adapter="answerability"))
        assert answer.same_bits(expected)
        _core.Executor.unload_adapter(executor, executor.adapters.task_id("answerability"))  # read again from disk
        again = collect(executor, executor.enqueue_request(copy.copy(request), adapter="answerability"))
        assert again.same_bits(expected)
        with pytest.raises(adaptrt.AdapterError, match="'answerability' is an aLoRA adapter"):
            executor.enqueue_request(make_request(prompt, 4), adapter="answerability:0.5+plain:0.5")
        executor.add_adapter("answerability", served.other, replace=True)
        base = served.answers([("base", prompt)])[0]
        replaced = collect(executor, executor.enqueue_request(make_request(prompt, 8), adapter="answerability"))
        assert replaced.same_bits(base)  # the new adapter's invocation tokens are not in this prompt


def test_prompts_without_the_invocation_tokens_are_answered_as_peft_does(served: Served) -> None:
    prompt = [*tokens_of(1, 20), *INVOCATION[:-1]]
    (base,) = served.answers([("base", prompt)])
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        executor.add_adapter("answerability", served.alora)
        answer = collect(executor, executor.enqueue_request(make_request(prompt, 8), adapter="answerability"))
    assert answer.same_bits(base)
    expected = served.generated(served.alora, prompt, 8)
    assert answer.tokens == expected
    with pytest.raises(adaptrt.AdapterError, match=r"tokens \[7, 3, 9\]; expected them, or a request without lora"):
        adaptrt.invocation_start(served.alora, prompt)


def test_positions_that_no_prompt_has_are_refused(served: Served) -> None:
    prompt = CASES[1][1]
    lora = adaptrt.LoraConfig.from_peft(0, served.alora, served.engine, active_from=0)
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        executor.put_adapter(lora)
        for active_from in (-1, len(prompt) + 1):
            request = make_request(prompt, 4, adaptrt.LoraConfig(0, active_from=active_from))
            with pytest.raises(
                adaptrt.RequestError, match=rf"active_from is {active_from}; accepted: 0 to {len(prompt)}"
            ):
                executor.enqueue_request(request)
        # The adapter changes only generated tokens, and not the first one, which comes from the prompt's last row.
        late = make_request(prompt, 4, adaptrt.LoraConfig(0, active_from=len(prompt)))
        base, generated = served.answers([("base", prompt)])[0], collect(executor, executor.enqueue_request(late))
        assert np.array_equal(generated.context_logits, base.context_logits)
        assert not np.isclose(generated.generation_logits[1], base.generation_logits[1]).all()


def test_where_an_adapter_begins_travels_with_its_config() -> None:
    config = adaptrt.LoraConfig(5, active_from=12)
    assert pickle.loads(pickle.dumps(config)).active_from == 12
    assert repr(config).endswith("replace=False, active_from=12)")


def test_alora_adapters_whose_start_cannot_be_stored_are_refused(served: Served, tmp_path: Path, capsys) -> None:
    with pytest.raises(adaptrt.AdapterError, match=r"an aLoRA adapter.*\[7, 3, 9\].*give active_from"):
        adaptrt.LoraConfig.from_peft(0, served.alora, served.engine)
    assert convert_adapter(served.alora, storage_dtype="float32").invocation_tokens == tuple(INVOCATION)
    assert command_line(["hf-lora-convert", "-i", str(served.alora), "-o", str(tmp_path / "converted")]) != 0
    assert "is an aLoRA adapter, and TensorRT-LLM's tensors cannot store" in capsys.readouterr().err
    assert not (tmp_path / "converted").exists()
    assert command_line(["inspect", str(served.alora), "--engine", str(served.engine)]) == 0
    assert "aLoRA, invoked by tokens [7, 3, 9]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("alora_invocation_tokens", [], "expected a list of token ids"),
        ("alora_invocation_tokens", [3, -1], "expected a list of token ids"),
        ("alora_invocation_tokens", "abc", "expected a list of token ids"),
        ("use_dora", True, "PEFT has no aLoRA with magnitudes"),
    ],
)
def test_other_configurations_are_refused(
    served: Served, tmp_path: Path, field: str, value: object, reason: str
) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in served.alora.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    config = json.loads((changed / "adapter_config.json").read_text())
    (changed / "adapter_config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(adaptrt.AdapterError, match=reason):
        adaptrt.LoraConfig.from_peft(0, changed, served.engine, active_from=0)

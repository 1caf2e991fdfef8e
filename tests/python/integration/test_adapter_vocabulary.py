"""LoRA, DoRA and trained tokens of lm_head and the embedding against PEFT in float32, tied or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
from safetensors.numpy import load_file

import adaptrt
from adaptrt._core import VOCABULARY_SLICE, lora_modules
from adaptrt.builder.build import build
from adaptrt.builder.config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.builder.conversion.convert import convert_checkpoint
from support.adapters import CONFIG, TENSORS, edit_config, edit_tensors
from support.families import FAMILIES, save_family
from support.kinds import save_kind
from support.models import ModelSpec, Reference, save_model
from support.serving import Answer, collect, make_request

# As in test_parity.py.
FLOAT32_TOLERANCE = 1e-4
BUILD = BuildConfig(
    max_batch_size=4,  # below the logit rows of a step, which the head takes in slices
    max_num_tokens=256,
    max_seq_len=96,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=80),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
# More tokens than a slice of the vocabulary has.
WIDE = ModelSpec(vocab_size=VOCABULARY_SLICE + 4099, hidden_size=24, num_attention_heads=2, intermediate_size=20)
VOCABULARIES = {"llama": WIDE.vocab_size}
# Of the embedding, and of a layer in the decoder.
NAMES = {"llama": ("embed_tokens", "q_proj"), "gemma2": ("embed_tokens", "q_proj"), "gpt2": ("wte", "c_attn"),
         "qwen2-moe": ("embed_tokens", "q_proj")}  # fmt: skip
TIED = ("gemma2", "gpt2")


def kinds(name: str) -> dict[str, Any]:
    embedding, layer = NAMES[name]

    def lora(*targets: str, **fields: Any) -> peft.LoraConfig:
        conv1d = {"fan_in_fan_out": True} if layer == "c_attn" and layer in targets else {}
        return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(targets), **conv1d, **fields)

    made = {
        "plain": lora(layer, r=3),
        "lm_head": lora("lm_head", layer, r=5, lora_alpha=7),
        "embedding": lora(embedding, r=4),
        "both": lora("lm_head", embedding, layer, r=6, rank_pattern={"lm_head": 70}),
        "dora-lm_head": lora("lm_head", r=2, use_dora=True),
        "dora-both": lora("lm_head", embedding, r=3, use_dora=True),
    }
    tokens = [2, 60, *(token for token in (16383, 16384, 20000) if token < VOCABULARIES.get(name, 61))]
    made["tokens"] = lora(layer, r=2, trainable_token_indices=tokens)
    if name in TIED:
        made["tokens-of-each"] = lora(layer, r=2, trainable_token_indices={embedding: [7, 8], "lm_head": [8, 9, 10]})
    return made


class Served:
    """A random model, its engine, and an adapter of each kind."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.vocabulary = VOCABULARIES.get(name, 61)
        if name == "llama":
            self.model = save_model(WIDE, directory / "model")
        else:
            self.model = save_family(FAMILIES[name], directory / "model")
        convert_checkpoint(self.model, directory / "checkpoint")
        build(directory / "checkpoint", BUILD, directory / "engine")
        self.engine = directory / "engine"
        self.adapters = {
            kind: save_kind(self.model, directory / kind, config, seed)
            for seed, (kind, config) in enumerate(kinds(name).items())
        }

    def answers(self, cases: list[tuple[str | None, list[int]]], **fields: object) -> list[Answer]:
        """What each (kind, prompt) gives, all of them at once; None: the base."""
        config = adaptrt.ExecutorConfig(**fields)
        with adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
            loras = {
                kind: adaptrt.LoraConfig.from_peft(task_id, directory, executor.engine)
                for task_id, (kind, directory) in enumerate(self.adapters.items())
            }
            requests = [make_request(prompt, 6, None if kind is None else loras[kind]) for kind, prompt in cases]
            return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]

    def cases(self) -> list[tuple[str | None, list[int]]]:
        return [
            (kind, [2, 7, 60, *np.random.default_rng(seed).integers(2, self.vocabulary, 5 + 4 * seed).tolist()])
            for seed, kind in enumerate([*self.adapters, None])
        ]


@pytest.fixture(scope="module", params=list(NAMES))
def served(request, tmp_path_factory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def test_all_of_them_in_one_batch_are_what_peft_computes(served: Served) -> None:
    base = Reference(served.model)
    for (kind, prompt), answer in zip(served.cases(), served.answers(served.cases()), strict=True):
        reference = base if kind is None else Reference(served.model, served.adapters[kind])
        expected = reference.logits(prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        scale = expected.max() - expected.min()
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * scale, kind
        assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()
        if kind is not None:
            assert np.abs(base.logits(prompt).numpy() - answer.context_logits).max() > 0.01 * scale, kind


def test_a_crowd_changes_no_bit(served: Served) -> None:
    together = served.answers(served.cases(), enable_chunked_context=True, max_num_tokens=32, num_threads=2)
    for case, answer in zip(served.cases(), together, strict=True):
        (alone,) = served.answers([case], num_threads=1)
        assert answer.same_bits(alone), case[0]


def test_they_come_back_after_eviction_and_add_up(served: Served) -> None:
    loras = [adaptrt.LoraConfig.from_peft(1, directory, served.engine) for directory in served.adapters.values()]
    sizes = [int(np.count_nonzero(np.asarray(lora.weights))) * 4 for lora in loras]
    cache = adaptrt.PeftCacheConfig(max_adapter_size=1, optimal_adapter_size=1, host_cache_size=max(sizes) * 5 // 4)
    config = adaptrt.ExecutorConfig(peft_cache_config=cache)
    prompt = list(range(5, 20))
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        for name, directory in served.adapters.items():
            executor.add_adapter(name, directory)

        def ask(name: str) -> Answer:
            return collect(executor, executor.enqueue_request(make_request(prompt, 4), adapter=name))

        first = {name: ask(name) for name in served.adapters}
        assert executor.lora_cache_stats().host_evictions > 0
        for name in reversed(served.adapters):
            assert ask(name).same_bits(first[name]), name
        # Half of an adapter, twice.
        halves = ask("lm_head:0.5+lm_head:0.5")
        np.testing.assert_allclose(halves.context_logits, first["lm_head"].context_logits, rtol=0, atol=1e-3)


def test_what_peft_does_not_load_back_is_refused(served: Served, tmp_path: Path) -> None:
    """Of ensure_weight_tying, PEFT 0.21 saves lm_head's share under target_modules that leave it out."""
    if served.name not in TIED:
        pytest.skip("its lm_head is not tied")
    embedding, _ = NAMES[served.name]
    config = peft.LoraConfig(target_modules=["lm_head", embedding], r=4, ensure_weight_tying=True)
    adapter = save_kind(served.model, tmp_path / "adapter", config, 1)
    with pytest.raises(adaptrt.AdapterError, match=r"module 'lm_head' has tensors, but .* leave it out"):
        adaptrt.LoraConfig.from_peft(1, adapter, served.engine)


def test_copies_of_the_base_are_compared(served: Served, tmp_path: Path) -> None:
    """PEFT saves the base's own weights beside an adapter of lm_head or the embedding, and takes them from there."""
    # PEFT knows embed_tokens and lm_head by their names, and GPT-2's wte not.
    kind, layer = ("lm_head", "lm_head") if served.name == "gpt2" else ("embedding", "embed_tokens")
    adapter = save_kind(served.model, tmp_path / "adapter", kinds(served.name)[kind], 1)
    (copy,) = (name for name in load_file(adapter / TENSORS) if name.endswith(f"{layer}.base_layer.weight"))

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        weight = tensors[copy].copy()
        weight[7, 3] += 1
        return tensors | {copy: weight}

    adaptrt.LoraConfig.from_peft(1, adapter, served.engine)
    edit_tensors(adapter, change)
    with pytest.raises(adaptrt.AdapterError, match=rf"'{copy}': is not the weight of '.*{layer}'"):
        adaptrt.LoraConfig.from_peft(1, adapter, served.engine)
    edit_tensors(adapter, lambda tensors: tensors | {copy: np.vstack([tensors[copy], tensors[copy][:1]])})
    with pytest.raises(adaptrt.AdapterError, match="resized embeddings are not served"):
        adaptrt.LoraConfig.from_peft(1, adapter, served.engine)


def test_trained_tokens_that_are_refused(served: Served, tmp_path: Path) -> None:
    adapter = save_kind(served.model, tmp_path / "adapter", kinds(served.name)["tokens"], 1)
    (name,) = (name for name in load_file(adapter / TENSORS) if name.endswith("trainable_tokens_delta"))

    def refusal() -> str:
        with pytest.raises(adaptrt.AdapterError) as error:
            adaptrt.LoraConfig.from_peft(1, adapter, served.engine)
        return str(error.value)

    tokens = json.loads((adapter / CONFIG).read_text())["trainable_token_indices"]
    edit_config(adapter, trainable_token_indices=[*tokens[:-1], served.vocabulary])
    assert f"token {served.vocabulary} is beyond the base's vocabulary of {served.vocabulary}; new tokens" in refusal()
    edit_config(adapter, trainable_token_indices=tokens[:-1])
    assert f"expected a row for each of {len(tokens) - 1} trainable_token_indices" in refusal()
    edit_config(adapter, trainable_token_indices=[2, 2])
    assert "names a token twice" in refusal()
    edit_config(adapter, trainable_token_indices=tokens)
    edit_tensors(adapter, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    assert "has no trainable_tokens_delta" in refusal()
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        executor.add_adapter("tokens", served.adapters["tokens"])
        executor.add_adapter("plain", served.adapters["plain"])
        with pytest.raises(adaptrt.AdapterError, match="'tokens' has trained tokens, which take the base's place"):
            executor.enqueue_request(make_request([3], 1), adapter="plain:0.5+tokens:0.5")


def test_rows_of_the_vocabulary_that_are_refused(served: Served) -> None:
    ids = {info.name: info.id for info in lora_modules()}
    lora = adaptrt.LoraConfig.from_peft(1, served.adapters["lm_head"], served.engine)
    weights, config = np.asarray(lora.weights), np.asarray(lora.config)
    heads = np.flatnonzero(config[0, :, 0] == ids["lm_head"])
    slices = -(-served.vocabulary // VOCABULARY_SLICE)
    assert config[0, heads, 1].tolist() == list(range(slices))
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:

        def refusal(weights: np.ndarray, config: np.ndarray) -> str:
            with pytest.raises(adaptrt.AdapterError) as error:
                executor.enqueue_request(make_request([3, 4], 1, adaptrt.LoraConfig(9, weights, config)))
            return str(error.value)

        beyond = config.copy()
        beyond[0, heads[-1], 1] = slices
        assert f"this engine's vocabulary has no slice {slices} for lm_head" in refusal(weights, beyond)
        if slices > 1:
            other = weights.copy()
            other[0, heads[1], 0] += 1
            assert "lm_head's slices 0 and 1 have different A; all have the same" in refusal(other, config)
            some = np.delete(np.arange(len(config[0])), heads[1])
            assert "lm_head has rows for 1 of the vocabulary's 2 slices" in refusal(weights[:, some], config[:, some])
        collect(executor, executor.enqueue_request(make_request([3, 4], 1, lora)))

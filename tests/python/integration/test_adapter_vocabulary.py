"""LoRA, DoRA and trained tokens of lm_head and the embedding against PEFT in float32, tied or not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
from safetensors.numpy import load_file

import adaptrt
from adaptrt._core import VOCABULARY_SLICE, lora_modules
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.adapters import CONFIG, TENSORS, edit_config, edit_tensors
from support.kinds import save_kind
from support.served_kinds import ServedKinds
from support.serving import collect, make_request
from support.vocabularies import NAMES, TIED, WITHOUT_BIAS, lora_of, serve_kinds, vocabulary_of

BUILD = BuildConfig(
    max_batch_size=4,  # less than the logit rows of a step, which the head computes in slices
    max_num_tokens=256,
    max_seq_len=96,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=80),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)


def kinds(name: str) -> dict[str, Any]:
    embedding, layer = NAMES[name]

    lora = partial(lora_of, name)
    made = {
        "plain": lora(layer, r=3),
        "lm_head": lora("lm_head", layer, r=5, lora_alpha=7),
        "embedding": lora(embedding, r=4),
        "both": lora("lm_head", embedding, layer, r=6, rank_pattern={"lm_head": 70}),
        "dora-lm_head": lora("lm_head", r=2, use_dora=True),
        "dora-both": lora("lm_head", embedding, r=3, use_dora=True),
    }
    tokens = [2, 60, *(token for token in (16383, 16384, 20000) if token < vocabulary_of(name))]
    made["tokens"] = lora(layer, r=2, trainable_token_indices=tokens)
    if name in TIED:
        made["tokens-of-each"] = lora(layer, r=2, trainable_token_indices={embedding: [7, 8], "lm_head": [8, 9, 10]})
    return made


@pytest.fixture(scope="module", params=WITHOUT_BIAS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(name: str, tmp_path_factory) -> ServedKinds:
    return serve_kinds(name, tmp_path_factory.mktemp(name), kinds(name), BUILD, first_tokens=(2, 7, 60))


def test_all_of_them_in_one_batch_are_what_peft_computes(served: ServedKinds) -> None:
    served.check_against_peft()


def test_a_crowd_changes_no_bit(served: ServedKinds) -> None:
    served.check_crowd()


def test_they_come_back_after_eviction(served: ServedKinds) -> None:
    loras = [adaptrt.LoraConfig.from_peft(1, directory, served.engine) for directory in served.adapters.values()]
    served.check_eviction(max(int(np.count_nonzero(np.asarray(lora.weights))) for lora in loras) * 5)


def test_half_of_an_adapter_twice_is_the_adapter(served: ServedKinds) -> None:
    prompt = list(range(5, 20))
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        executor.add_adapter("lm_head", served.adapters["lm_head"])
        halves, whole = (
            collect(executor, executor.enqueue_request(make_request(prompt, 4), adapter=name))
            for name in ("lm_head:0.5+lm_head:0.5", "lm_head")
        )
    np.testing.assert_allclose(halves.context_logits, whole.context_logits, rtol=0, atol=1e-3)


def test_weights_that_peft_does_not_load_are_refused(name: str, served: ServedKinds, tmp_path: Path) -> None:
    """With ensure_weight_tying, PEFT 0.21 saves lm_head's tensors although target_modules leaves lm_head out."""
    if name not in TIED:
        pytest.skip("its lm_head is not tied")
    embedding, _ = NAMES[name]
    config = peft.LoraConfig(target_modules=["lm_head", embedding], r=4, ensure_weight_tying=True)
    adapter = save_kind(served.model, tmp_path / "adapter", config, 1)
    with pytest.raises(adaptrt.AdapterError, match=r"module 'lm_head' has tensors, but .* leave it out"):
        adaptrt.LoraConfig.from_peft(1, adapter, served.engine)


def test_copies_of_the_base_are_compared(name: str, served: ServedKinds, tmp_path: Path) -> None:
    """PEFT saves the base's own weights with an adapter of lm_head or the embedding, and loads them from there."""
    # PEFT recognises embed_tokens and lm_head by their names, but not GPT-2's wte.
    kind, layer = ("lm_head", "lm_head") if name == "gpt2" else ("embedding", "embed_tokens")
    adapter = save_kind(served.model, tmp_path / "adapter", kinds(name)[kind], 1)
    (copy,) = (name for name in load_file(adapter / TENSORS) if name.endswith(f"{layer}.base_layer.weight"))

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        weight = tensors[copy].copy()
        weight[7, 3] += 1
        return tensors | {copy: weight}

    adaptrt.LoraConfig.from_peft(1, adapter, served.engine)
    edit_tensors(adapter, change)
    edit_tensors(adapter, lambda tensors: tensors | {copy: np.vstack([tensors[copy], tensors[copy][:1]])})
    tokens = served.vocabulary
    with pytest.raises(
        adaptrt.AdapterError, match=f"has {tokens} tokens, the base {tokens}, and other tensors {tokens + 1}"
    ):
        adaptrt.LoraConfig.from_peft(1, adapter, served.engine)


def test_trained_tokens_that_are_refused(name: str, served: ServedKinds, tmp_path: Path) -> None:
    adapter = save_kind(served.model, tmp_path / "adapter", kinds(name)["tokens"], 1)
    is_tied = name in TIED
    (name,) = (name for name in load_file(adapter / TENSORS) if name.endswith("trainable_tokens_delta"))

    def refusal() -> str:
        with pytest.raises(adaptrt.AdapterError) as error:
            adaptrt.LoraConfig.from_peft(1, adapter, served.engine)
        return str(error.value)

    tokens = json.loads((adapter / CONFIG).read_text())["trainable_token_indices"]
    edit_config(adapter, trainable_token_indices=[*tokens[:-1], served.vocabulary])
    reason = refusal()
    if is_tied:
        assert (
            f"it brings 1 tokens beyond the base's vocabulary of {served.vocabulary}, above max_extra_tokens 0"
            in reason
        )
    else:
        assert f"its file has no row of 'lm_head' for token {served.vocabulary};" in reason
    edit_config(adapter, trainable_token_indices=tokens[:-1])
    assert f"expected a row for each of {len(tokens) - 1} trained tokens" in refusal()
    edit_config(adapter, trainable_token_indices=[2, 2])
    assert "names a token twice" in refusal()
    edit_config(adapter, trainable_token_indices=tokens)
    edit_tensors(adapter, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    assert "has no trainable_tokens_delta" in refusal()
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        executor.add_adapter("tokens", served.adapters["tokens"])
        executor.add_adapter("plain", served.adapters["plain"])
        with pytest.raises(
            adaptrt.AdapterError, match="'tokens' has trained tokens or whole weights, which replace the base's"
        ):
            executor.enqueue_request(make_request([3], 1), adapter="plain:0.5+tokens:0.5")


def test_rows_of_the_vocabulary_that_are_refused(served: ServedKinds) -> None:
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

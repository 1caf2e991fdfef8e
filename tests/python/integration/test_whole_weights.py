"""Complete weights of lm_head and the embedding (modules_to_save), and trained tokens, against PEFT in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
from safetensors.numpy import load_file

import adaptrt
from adaptrt._core import lora_modules
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.tools.inspect_adapter import describe_adapter
from support.adapters import TENSORS, base_weights, edit_config, edit_tensors
from support.kinds import save_kind
from support.served_kinds import ServedKinds, engine_of
from support.serving import collect, make_request
from support.vocabularies import NAMES, hidden_size_of, lora_of, serve_kinds

PATHS = {"gpt2": "transformer.wte"}
FEW = (2, 7, 60)


def build_config(max_lora_rank: int) -> BuildConfig:
    return BuildConfig(
        max_batch_size=4,
        max_num_tokens=256,
        max_seq_len=96,
        tokens_per_block=8,
        lora_config=LoraBuildConfig(max_lora_rank=max_lora_rank),
        plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
    )


def kinds(name: str) -> dict[str, Any]:
    embedding, layer = NAMES[name]

    lora = partial(lora_of, name)
    made = {
        "plain": lora(layer, r=3),
        "lm_head": lora(layer, r=5, modules_to_save=["lm_head"]),
        "embedding": lora(layer, r=4, modules_to_save=[embedding]),
        "both": lora(layer, r=2, modules_to_save=["lm_head", embedding]),
        "dora-both": lora(layer, r=2, use_dora=True, modules_to_save=["lm_head", embedding]),
        "few": lora(layer, r=2, modules_to_save=["lm_head", embedding]),
        "tokens-alone": peft.TrainableTokensConfig(
            task_type="CAUSAL_LM", token_indices=[3, 60, 4], target_modules=[embedding]
        ),
    }
    if name != "phi2":  # its lm_head has a bias, which PEFT would save as well
        made["put-into-the-base"] = lora("lm_head", layer, r=2)
    if name == "gemma2":
        made["tied"] = lora(layer, r=2, modules_to_save=[embedding], ensure_weight_tying=True)
    if name == "llama":
        made["tokens-of-lm-head"] = peft.TrainableTokensConfig(
            task_type="CAUSAL_LM", token_indices=[3, 17000], target_modules=["lm_head", embedding]
        )
    return made


def change_few(name: str, model: Path, adapter: Path) -> None:
    """Resets all tokens except a few to the base's rows."""
    base = base_weights(model)
    paths = {f"base_model.model.{path}.weight": path for path in ("lm_head", PATHS.get(name, "model.embed_tokens"))}

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for tensor, path in paths.items():
            values = base[path].copy()
            values[list(FEW)] = tensors[tensor][list(FEW)]
            tensors[tensor] = values
        return tensors

    edit_tensors(adapter, change)


def put_into_the_base(adapter: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        name = "base_model.model.lm_head.base_layer.weight"
        generator = np.random.default_rng(3)
        return {**tensors, name: tensors[name] + 0.3 * generator.standard_normal(tensors[name].shape, np.float32)}

    edit_tensors(adapter, change)


def without_bias(adapter: Path) -> Path:
    edit_tensors(
        adapter, lambda tensors: {name: value for name, value in tensors.items() if "lm_head.bias" not in name}
    )
    return adapter


@pytest.fixture(scope="module", params=list(NAMES))
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(name: str, tmp_path_factory) -> ServedKinds:
    def change(model: Path, adapters: Mapping[str, Path]) -> None:
        change_few(name, model, adapters["few"])
        if "put-into-the-base" in adapters:
            put_into_the_base(adapters["put-into-the-base"])

    return serve_kinds(
        name,
        tmp_path_factory.mktemp(name),
        kinds(name),
        build_config(hidden_size_of(name)),
        change=change,
        first_tokens=(*FEW, 3, 4),
    )


def test_all_of_them_in_one_batch_are_what_peft_computes(served: ServedKinds) -> None:
    served.check_against_peft()


def test_a_crowd_changes_no_bit(served: ServedKinds) -> None:
    served.check_crowd()


def test_they_come_back_after_eviction(served: ServedKinds) -> None:
    sizes = []
    for kind in served.adapters:
        rows = np.asarray(served.lora(kind).weights)[0]
        sizes.append(sum(int(np.flatnonzero(row)[-1]) + 1 for row in rows) * rows.itemsize)
    served.check_eviction(max(sizes) * 5 // 4)


def test_an_adapter_takes_the_place_of_another(served: ServedKinds) -> None:
    prompt = list(range(2, 20))
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:

        def ask(name: str) -> Any:
            return collect(executor, executor.enqueue_request(make_request(prompt, 4), adapter=name))

        executor.add_adapter("both", served.adapters["both"])
        executor.add_adapter("one", served.adapters["plain"])
        plain = ask("one")
        executor.add_adapter("one", served.adapters["both"], replace=True)
        assert ask("one").same_bits(ask("both"))
        executor.add_adapter("one", served.adapters["plain"], replace=True)
        assert ask("one").same_bits(plain)
        with pytest.raises(adaptrt.AdapterError, match="'both' has trained tokens or whole weights"):
            executor.enqueue_request(make_request([3], 1), adapter="plain:0.5+both:0.5".replace("plain", "one"))


def test_rows_have_the_ranks_that_are_needed(name: str, served: ServedKinds) -> None:
    ids = {info.id: info.name for info in lora_modules()}

    def ranks(kind: str) -> dict[str, int]:
        rows = np.asarray(served.lora(kind).config)[0]
        return {ids[module]: rank for module, _, rank, _ in rows.tolist() if "attn" not in ids[module]}

    hidden_size = hidden_size_of(name)
    assert ranks("lm_head") == {"lm_head": hidden_size}
    assert ranks("both") == {"lm_head": hidden_size, "embedding": hidden_size}
    assert ranks("few") == {"lm_head": 3, "embedding": 3}
    description = describe_adapter(served.adapters["both"], served.engine)
    assert len(description.whole_weights) == 2
    assert {module.module: module.rank for module in description.modules}["lm_head"] == hidden_size


def test_an_engine_without_room_takes_few_tokens_alone(name: str, served: ServedKinds, tmp_path: Path) -> None:
    engine = engine_of(served.model, tmp_path, build_config(8))
    adaptrt.LoraConfig.from_peft(1, served.adapters["few"], engine)
    tokens = served.vocabulary
    rank = min(tokens, hidden_size_of(name))
    reason = (
        rf"{tokens} of {tokens} tokens of '\S*lm_head' differ from the base's, which needs LoRA of rank {rank}, "
        rf"above max_lora_rank 8; build with --max_lora_rank {rank} \(the adapter takes [\d.]+ MiB of the LoRA cache"
    )
    with pytest.raises(adaptrt.AdapterError, match=reason):
        adaptrt.LoraConfig.from_peft(1, served.adapters["lm_head"], engine)
    config = build_config(8)
    carrying = dataclasses.replace(config.lora_config, lora_dir=(served.adapters["lm_head"],))
    with pytest.raises(adaptrt.AdapterError, match=reason):
        engine_of(served.model, tmp_path / "carrying", dataclasses.replace(config, lora_config=carrying))


def test_whole_weights_that_are_refused(name: str, served: ServedKinds, tmp_path: Path) -> None:
    made = without_bias(save_kind(served.model, tmp_path / "adapter", kinds(name)["lm_head"], 9))
    tensor = "base_model.model.lm_head.weight"
    whole = load_file(made / TENSORS)[tensor]

    def refusal() -> str:
        with pytest.raises(adaptrt.AdapterError) as error:
            adaptrt.LoraConfig.from_peft(1, made, served.engine)
        return str(error.value)

    for changed, reason in (
        (np.vstack([whole, whole[:1]]), f"its file has no row of '{PATHS.get(name, 'model.embed_tokens')}' for token"),
        (whole[:, :-1].copy(), f"is {[len(whole), whole.shape[1] - 1]}, and the model's 'lm_head' is"),
        (whole.reshape(-1), "expected [tokens, hidden size]"),
        (np.where(np.arange(len(whole))[:, np.newaxis] == 5, np.float32(np.nan), whole), "has NaN"),
        (whole.astype(np.int32), "is int32"),
    ):
        edit_tensors(made, lambda tensors, changed=changed: {**tensors, tensor: changed})
        assert reason in refusal(), reason
    edit_tensors(made, lambda tensors: {key: value for key, value in tensors.items() if key != tensor})
    assert "modules_to_save names 'lm_head', but the file has no accepted weight of it" in refusal()
    edit_config(made, modules_to_save=None)
    adaptrt.LoraConfig.from_peft(1, made, served.engine)
    edit_config(made, modules_to_save=["input_layernorm"])
    assert "modules_to_save names 'input_layernorm'" in refusal()
    edit_config(made, modules_to_save="lm_head")
    assert "expected a list of names of modules" in refusal()


def test_a_weight_that_is_the_bases_costs_nothing(served: ServedKinds, tmp_path: Path, name: str) -> None:
    made = without_bias(save_kind(served.model, tmp_path / "adapter", kinds(name)["lm_head"], 9))
    base = base_weights(served.model)["lm_head"]
    edit_tensors(made, lambda tensors: {**tensors, "base_model.model.lm_head.weight": base})
    rows = np.asarray(adaptrt.LoraConfig.from_peft(1, made, served.engine).config)[0]
    assert 26 not in rows[:, 0]

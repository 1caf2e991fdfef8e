"""Other kinds of adapters than PEFT's LoRA: refusals, and commands that accept them."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
from safetensors.numpy import load_file

from adaptrt import _core
from adaptrt.builder.cli import main as command_line
from adaptrt.formats.adapter import Term, convert_adapter, normalize_adapter, weighted_sum
from adaptrt.formats.adapter.adapter_copy import adapter_checksum, copy_adapter
from adaptrt.formats.adapter.base_weights import HuggingFaceModel
from adaptrt.formats.network.adapter_limits import AdapterLimits
from adaptrt.formats.network.adapter_sites import AdaptedModules
from adaptrt.runtime import lora_config
from support.adapters import CONFIG, TENSORS, edit_config, edit_tensors
from support.families import FAMILIES, save_family
from support.kinds import as_mlx, configs, save_kind, save_with_initial
from support.models import ALL_MODULES, ModelSpec, save_adapter, save_model

MLX_TENSORS = "adapters.safetensors"
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(ModelSpec(intermediate_size=40), tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def kinds(model: Path, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kinds")
    made = configs(ALL_MODULES, is_transposed=False)
    return {
        name: save_kind(model, root / name, made[name], 1) for name in ("adalora", "vera", "loha", "lokr-in-factors")
    }


def copy_of(directory: Path, place: Path) -> Path:
    copy_adapter(directory, place)
    return place


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(_core.AdapterError) as error:
        convert_adapter(directory, storage_dtype="float32", **options)
    return str(error.value)


@pytest.mark.parametrize(("kind", "rank"), [("adalora", 6), ("loha", 16), ("lokr-in-factors", 4), ("vera", 7)])
def test_ranks_are_compared_before_anything_is_multiplied(kind: str, rank: int, kinds, model: Path) -> None:
    converted = convert_adapter(kinds[kind], storage_dtype="float32", base=model, limits=AdapterLimits(max_rank=rank))
    assert converted.config[0, :, 2].max() == rank
    text = refusal(kinds[kind], base=model, limits=AdapterLimits(max_rank=rank - 1))
    assert f"': the rank {rank} is above max_lora_rank {rank - 1}" in text


@pytest.mark.parametrize(
    ("kind", "fields"), [("loha", {"lora_alpha": None}), ("vera", {"trainable_token_indices": None})]
)
def test_a_null_field_of_another_kind_changes_nothing(
    kind: str, fields: dict, kinds, model: Path, tmp_path: Path
) -> None:
    adapter = copy_of(kinds[kind], tmp_path / "adapter")
    expected = convert_adapter(adapter, storage_dtype="float32", base=model)
    edit_config(adapter, **fields)
    found = convert_adapter(adapter, storage_dtype="float32", base=model)
    assert np.array_equal(found.weights, expected.weights)


def test_adalora_drops_modules_that_were_pruned_whole(kinds) -> None:
    paths = convert_adapter(kinds["adalora"], storage_dtype="float32").paths
    assert len(paths) == 2 * len(ALL_MODULES) - 1
    assert "model.layers.0.self_attn.q_proj" not in paths


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("adalora", {"init_r": 5}, "the rank is 6 in lora_A, but 5 by adapter_config.json"),
        ("adalora", {"rank_pattern": None}, "the rank is 0 in lora_A, but 6 by adapter_config.json"),
        ("adalora", {"rank_pattern": {"a": [1]}}, "list of true and false"),
        ("adalora", {"use_dora": True}, "AdaLoRA has no DoRA"),
        ("vera", {"r": 8}, "the rank is 7 in vera_lambda_d, but 8 by adapter_config.json"),
        ("vera", {"projection_prng_key": -1}, "expected a whole number from 0"),
        ("loha", {"alpha": "x"}, "expected a finite number"),
        ("loha", {"rank_pattern": None}, "the rank is 2 in hada_w1_a, but 4 by adapter_config.json"),
        ("lokr-in-factors", {"r": 3}, "the rank is 2 in lokr_w"),
        ("lokr-in-factors", {"lora_alpha": 3}, "an unknown field"),
    ],
)
def test_fields_that_peft_would_not_load(kind: str, fields: dict, reason: str, kinds, model, tmp_path: Path) -> None:
    adapter = copy_of(kinds[kind], tmp_path / "adapter")
    edit_config(adapter, **fields)
    assert reason in refusal(adapter, base=model)


@pytest.mark.parametrize(
    ("kind", "edit", "reason"),
    [
        ("adalora", lambda name: "k_proj.lora_E" in name, "but no lora_E"),
        ("loha", lambda name: "q_proj.hada_w2_b" in name, "but no hada_w2_b"),
        ("lokr-in-factors", lambda name: "q_proj.lokr_w2" in name, "but no lokr_w2"),
        ("vera", lambda name: name.endswith("vera_A"), "expected one tensor base_model.vera_A, found 0"),
    ],
)
def test_tensors_that_are_missing(kind: str, edit, reason: str, kinds, model, tmp_path: Path) -> None:
    adapter = copy_of(kinds[kind], tmp_path / "adapter")
    edit_tensors(adapter, lambda tensors: {name: t for name, t in tensors.items() if not edit(name)})
    assert reason in refusal(adapter, base=model)


def test_lokr_has_each_factor_once(kinds, tmp_path: Path) -> None:
    adapter = copy_of(kinds["lokr-in-factors"], tmp_path / "adapter")
    edit_tensors(adapter, lambda tensors: {**tensors, f"{Q_PROJ}lokr_w1": np.ones((6, 6), np.float32)})
    assert "'model.layers.0.self_attn.q_proj' has tensors that do not belong together" in refusal(adapter)


def test_vera_needs_the_model(kinds) -> None:
    assert "cut to the sizes of layers; give the base model" in refusal(kinds["vera"])


def test_vera_projections_that_are_too_small(kinds, model: Path, tmp_path: Path) -> None:
    adapter = copy_of(kinds["vera"], tmp_path / "adapter")
    edit_tensors(adapter, lambda tensors: {n: t[:, :-1] if n.endswith("vera_A") else t for n, t in tensors.items()})
    assert "tensor 'base_model.vera_A': has the shape [7, 39], expected [7, 40] at least" in refusal(
        adapter, base=model
    )


def save_ia3(model: Path, directory: Path, targets: list[str], feedforward: list[str]) -> Path:
    config = peft.IA3Config(target_modules=targets, feedforward_modules=feedforward, task_type="CAUSAL_LM")
    return save_kind(model, directory, config, 1)


def test_ia3_is_rows_of_factors_alone(model: Path, tmp_path: Path) -> None:
    adapter = save_ia3(model, tmp_path / "ia3", ["k_proj", "down_proj"], ["down_proj"])
    assert "the model's biases and MLP; give the base model" in refusal(adapter)
    converted = convert_adapter(adapter, storage_dtype="float32", base=model)
    assert converted.config[0].tolist() == [[2, 0, 1, 1], [7, 0, 1, 1], [2, 1, 1, 1], [7, 1, 1, 1]]
    assert converted.paths[1] == "model.layers.0.mlp.up_proj"
    tensors = load_file(adapter / TENSORS)
    up = converted.weights[0, 1]
    assert not up[: 36 + 40].any()
    np.testing.assert_array_equal(up[76:116], tensors["base_model.model.model.layers.0.mlp.down_proj.ia3_l"][0])
    with pytest.raises(_core.AdapterError, match="is not a DoRA adapter"):
        normalize_adapter(adapter, tmp_path / "normalised", model)


@pytest.mark.parametrize(
    ("targets", "feedforward", "reason"),
    [
        (["q_proj", "o_proj"], ["o_proj"], "multiplies the inputs of 'model.layers.0.self_attn.o_proj'"),
        (["q_proj", "k_proj"], ["q_proj"], "accepted: inputs of a gated MLP's last layer"),
    ],
)
def test_ia3_on_inputs_that_no_outputs_are(targets, feedforward, reason: str, model: Path, tmp_path: Path) -> None:
    adapter = save_ia3(model, tmp_path / "ia3", targets, feedforward)
    assert reason in refusal(adapter, base=model)
    edit_config(adapter, feedforward_modules=[])
    assert "has the shape [1, 36], expected [36, 1]" in refusal(adapter, base=model)


def test_biases_are_shifts_from_those_of_the_base(tmp_path: Path) -> None:
    gpt2 = save_family(FAMILIES["gpt2"], tmp_path / "gpt2")
    modules = HuggingFaceModel(gpt2).modules
    of_base = load_file(gpt2 / "model.safetensors")["transformer.h.0.attn.c_attn.bias"]
    name = "base_model.model.transformer.h.0.attn.c_attn"

    ia3 = save_ia3(gpt2, tmp_path / "ia3", ["c_attn"], [])
    assert "its biases depend on the base model's; give the base model" in refusal(ia3, modules=modules)
    converted = convert_adapter(ia3, storage_dtype="float32", base=gpt2)
    assert converted.config[0].tolist() == [[0, layer, 1, 3] for layer in range(3)]
    factors = load_file(ia3 / TENSORS)[f"{name}.ia3_l"][:, 0]
    row = converted.weights[0, 0]
    np.testing.assert_array_equal(row[36 + 108 :], np.concatenate([factors, (factors - 1) * of_base]))

    config = peft.LoraConfig(r=2, bias="lora_only", target_modules=["c_attn"], fan_in_fan_out=True)
    trained = save_kind(gpt2, tmp_path / "trained", config, 2)
    assert "its biases depend on the base model's; give the base model" in refusal(trained)
    converted = convert_adapter(trained, storage_dtype="float32", base=gpt2)
    assert converted.config[0].tolist() == [[0, layer, 2, 2] for layer in range(3)]
    bias = load_file(trained / TENSORS)[f"{name}.base_layer.bias"]
    np.testing.assert_array_equal(converted.weights[0, 0, 2 * (36 + 108) :], bias - of_base)
    # PEFT's first releases used this name; nothing else of this layer was trained.
    edit_tensors(trained, lambda tensors: {f"{name}.bias": bias})
    assert "a bias of a layer without A and B; give the base model" in refusal(trained)
    converted = convert_adapter(trained, storage_dtype="float32", base=gpt2)
    assert converted.config[0].tolist() == [[0, 0, 1, 2]]
    np.testing.assert_array_equal(converted.weights[0, 0, 36 + 108 :], bias - of_base)

    edit_tensors(trained, lambda tensors: {f"{name}.bias": bias[1:]})
    assert "a bias of 107 outputs, but the model's layer has one of 108" in refusal(trained, base=gpt2)
    edit_tensors(trained, lambda tensors: {f"{name}.bias": bias, f"{name}.base_layer.bias": bias})
    assert "is the same as" in refusal(trained, base=gpt2)
    edit_config(trained, bias="none")
    assert "a trained bias, but adapter_config.json's bias is none" in refusal(trained, base=gpt2)


def test_a_bias_of_a_layer_without_one(model: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, bias="all", target_modules=["q_proj"])
    adapter = save_kind(model, tmp_path / "adapter", config, 2)
    bias = {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias": np.ones(36, np.float32)}
    edit_tensors(adapter, lambda tensors: tensors | bias)
    assert "a bias of 36 outputs, but the model's layer has none" in refusal(adapter, base=model)


def test_sums_with_biases_are_refused(tmp_path: Path) -> None:
    gpt2 = save_family(FAMILIES["gpt2"], tmp_path / "gpt2")
    config = peft.LoraConfig(r=2, lora_bias=True, target_modules=["c_attn"], fan_in_fan_out=True)
    converted = convert_adapter(save_kind(gpt2, tmp_path / "a", config, 2), storage_dtype="float32", base=gpt2)
    modules = HuggingFaceModel(gpt2).modules
    assert modules is not None
    with pytest.raises(_core.AdapterError, match=r"'a' has biases .*, which PEFT's weighted sums leave out"):
        weighted_sum([Term("a", converted, 1.0)], modules, _core.DType.FLOAT32, 8)


def test_ranks_of_a_sum_may_add_up_to_exactly_the_largest(model: Path, tmp_path: Path) -> None:
    modules = HuggingFaceModel(model).modules
    assert modules is not None
    adapter = save_adapter(model, tmp_path / "a", 0, r=4, target_modules=["q_proj"])
    term = Term("a", convert_adapter(adapter, storage_dtype="float32", modules=modules), 0.5)
    summed = weighted_sum([term, term], modules, _core.DType.FLOAT32, 8)
    assert {row[2] for row in summed.config[0].tolist()} == {8}
    with pytest.raises(_core.AdapterError, match="the ranks are 4 of 'a' \\+ 4 of 'a', above max_lora_rank 7"):
        weighted_sum([term, term], modules, _core.DType.FLOAT32, 7)


def test_ranks_of_a_sum_are_compared_before_anything_is_converted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = HuggingFaceModel(model).modules
    assert modules is not None
    names = ["q_proj", "down_proj", "embed_tokens"]
    a, b = (
        save_adapter(model, tmp_path / name, number, r=4, rank_pattern={"embed_tokens": rank}, target_modules=names)
        for number, (name, rank) in enumerate({"a": 2, "b": 3}.items())
    )
    lora = types.SimpleNamespace(sites=[object()], max_rank=8, dtype=_core.DType.FLOAT32)
    engine: Any = types.SimpleNamespace(lora=lora, adapted_modules=modules, base_weights=lambda: None)
    converted: list[Path] = []
    monkeypatch.setattr(lora_config, "_converted", lambda directory, *_: converted.append(directory))
    monkeypatch.setattr(lora_config, "weighted_sum", lambda *_: None)
    lora_config.sum_of_directories([("a", a, 1.0), ("b", b, 0.5)], engine)
    assert converted == [a, b]
    lora.max_rank = 7
    with pytest.raises(_core.AdapterError) as raised:
        lora_config.sum_of_directories([("a", a, 1.0), ("b", b, 0.5)], engine)
    assert str(raised.value) == "; ".join(
        f"module 'model.layers.0.{name}': the ranks are 4 of 'a' + 4 of 'b', above max_lora_rank 7 "
        "(and for 1 other layer)"
        for name in ("self_attn.q_proj", "mlp.down_proj")
    )
    lora.max_rank = 4
    with pytest.raises(_core.AdapterError, match=r"'model.embed_tokens': the ranks are 2 of 'a' \+ 3 of 'b', above"):
        lora_config.sum_of_directories([("a", a, 1.0), ("b", b, 0.5)], engine)
    lora.max_rank = 8
    with pytest.raises(
        _core.AdapterError, match=r"the ranks are 4 of 'a' \+ 4 of 'b' \+ 4 of 'a', above max_lora_rank 8"
    ):
        lora_config.sum_of_directories([("a", a, 1.0), ("b", b, 0.5), ("a", a, 0.1)], engine)
    with pytest.raises(_core.AdapterError, match=r"( \+ 4 of 'a'){3} and so on, 20 in all, above max_lora_rank 8"):
        lora_config.sum_of_directories([("a", a, 1.0)] * 5, engine)
    assert len(converted) == 2


def test_an_initial_adapter_is_needed_where_the_base_was_changed(model: Path, tmp_path: Path, capsys) -> None:
    adapter, initial = save_with_initial(model, tmp_path, "pissa", 1, r=3, target_modules=["q_proj"])
    assert 'init_lora_weights = "pissa": this initialisation changed the base' in refusal(adapter)
    converted = convert_adapter(adapter, storage_dtype="float32", initial_adapter=initial)
    assert converted.config[0].tolist() == [[1, 0, 6, 0], [1, 1, 6, 0]]
    out = ["hf-lora-convert", "-i", str(adapter), "-o", str(tmp_path / "out"), "--storage-type", "float32"]
    assert command_line([*out, "--initial_adapter", str(initial)]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "model.lora_weights.npy"), converted.weights)
    capsys.readouterr()
    assert command_line(["inspect", str(adapter)]) == 0
    assert "pissa, which changed the base: can only be served with the initial adapter" in capsys.readouterr().out

    by_base = convert_adapter(adapter, storage_dtype="float32", base=model)
    for row, other in zip(by_base.weights[0], converted.weights[0], strict=True):
        (a, b), (other_a, other_b) = (np.split(values, [6 * 36]) for values in (row, other))
        product, expected = (y.reshape(36, 6) @ x.reshape(6, 36) for x, y in ((a, b), (other_a, other_b)))
        np.testing.assert_allclose(product, expected, rtol=0, atol=1e-5)
    edit_config(adapter, init_lora_weights="pissa_niter_4")
    assert "the adapter is only a part of the change; give the initial adapter, or put" in refusal(adapter, base=model)
    edit_config(adapter, init_lora_weights="pissa")
    assert "an initial adapter is plain LoRA" in refusal(adapter, initial_adapter=adapter)
    assert "left the base as it was" in refusal(initial, initial_adapter=initial)
    other = save_adapter(model, tmp_path / "other", 1, r=2, target_modules=["q_proj", "k_proj"])
    text = refusal(adapter, initial_adapter=other)
    assert "module 'model.layers.0.self_attn.q_proj' has another rank, shape or scale" in text
    assert "module 'model.layers.0.self_attn.k_proj' is not in" in text


@pytest.fixture
def mlx(model: Path, tmp_path: Path) -> Path:
    source = save_adapter(
        model, tmp_path / "peft", 1, r=3, target_modules=["q_proj", "up_proj"], layers_to_transform=[1]
    )
    return as_mlx(source, tmp_path / "mlx", num_layers=1, keys=["self_attn.q_proj", "mlp.up_proj"])


def test_mlx_adapters_go_through_the_same_commands(mlx: Path, tmp_path: Path, capsys) -> None:
    of_peft = convert_adapter(tmp_path / "peft", storage_dtype="float16")
    assert command_line(["hf-lora-convert", "-i", str(mlx), "-o", str(tmp_path / "out")]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "model.lora_weights.npy"), of_peft.weights)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "model.lora_config.npy"), of_peft.config)
    capsys.readouterr()
    assert command_line(["inspect", str(mlx)]) == 0
    assert "kind     LoRA of MLX-LM\n" in capsys.readouterr().out
    before = adapter_checksum(mlx)
    assert copy_adapter(mlx, tmp_path / "copy") == before
    (mlx / MLX_TENSORS).write_bytes((mlx / MLX_TENSORS).read_bytes() + b"0")
    assert adapter_checksum(mlx) != before


def test_mlx_magnitudes_are_normalised_and_stripped(model: Path, tmp_path: Path) -> None:
    source = save_adapter(model, tmp_path / "peft", 1, r=3, use_dora=True)
    mlx = as_mlx(source, tmp_path / "mlx", num_layers=-1)
    assert "are not marked as normalised" in refusal(mlx)
    expected = convert_adapter(mlx, storage_dtype="float32", base=model)
    flags = ["normalize-dora", "-i", str(mlx), "-b", str(model)]
    assert command_line([*flags, "-o", str(tmp_path / "normalised")]) == 0
    np.testing.assert_array_equal(
        convert_adapter(tmp_path / "normalised", storage_dtype="float32").weights, expected.weights
    )
    assert command_line([*flags, "-o", str(tmp_path / "plain"), "--strip"]) == 0
    assert json.loads((tmp_path / "plain" / CONFIG).read_text())["fine_tune_type"] == "lora"
    assert not convert_adapter(tmp_path / "plain", storage_dtype="float32").config[0, :, 3].any()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"fine_tune_type": "dora"}, "has no m, but adapter_config.json says dora"),
        ({"fine_tune_type": "qlora"}, 'fine_tune_type = "qlora": accepted: lora, dora'),
        ({"num_layers": None}, "num_layers is null; expected an integer"),
        ({"lora_parameters": None}, "lora_parameters is missing"),
        ({"lora_parameters": {"rank": 3}}, "lora_parameters.scale is missing"),
        ({"lora_parameters": {"rank": 3, "scale": 2.0, "alpha": 16}}, "MLX-LM multiplied scale by alpha / rank, newer"),
        ({"lora_parameters": {"rank": 3, "scale": 2.0, "bias": 1}}, "lora_parameters.bias is unknown"),
        ({"lora_parameters": {"rank": 4, "scale": 2.0}}, "the rank is 3 in lora_a, but 4 by adapter_config.json"),
        ({"lora_parameters": {"rank": 3, "scale": 2.0, "keys": ["mlp.up_proj"]}}, "keys and num_layers leave it out"),
    ],
)
def test_mlx_fields(fields: dict, reason: str, mlx: Path) -> None:
    edit_config(mlx, **fields)
    assert reason in refusal(mlx)


def test_mlx_layers_count_from_the_last(mlx: Path, model: Path, tmp_path: Path) -> None:
    source = save_adapter(model, tmp_path / "first", 1, r=3, target_modules=["q_proj"], layers_to_transform=[0])
    first = as_mlx(source, tmp_path / "mlx-first", num_layers=1)
    assert "keys and num_layers leave it out" in refusal(first, base=model)
    convert_adapter(mlx, storage_dtype="float32", base=model)


def test_mlx_files(mlx: Path) -> None:
    (mlx / MLX_TENSORS).write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "is a Git LFS pointer" in refusal(mlx)
    (mlx / MLX_TENSORS).unlink()
    assert f"{mlx}: has no {MLX_TENSORS}" in refusal(mlx)


def test_an_alpha_that_is_the_rank_changes_nothing(mlx: Path) -> None:
    expected = convert_adapter(mlx, storage_dtype="float32")
    parameters = json.loads((mlx / CONFIG).read_text())["lora_parameters"]
    edit_config(mlx, lora_parameters={**parameters, "alpha": 3})
    np.testing.assert_array_equal(convert_adapter(mlx, storage_dtype="float32").weights, expected.weights)


def test_a_kind_of_another_peft_type_is_not_read_as_it(kinds, tmp_path: Path) -> None:
    """AdaLoRA and LoRA have nearly the same tensor names."""
    adapter = copy_of(kinds["adalora"], tmp_path / "adapter")
    fields = peft.LoraConfig(r=6, target_modules=ALL_MODULES, task_type="CAUSAL_LM").to_dict()
    (adapter / CONFIG).write_text(json.dumps({**fields, "target_modules": ALL_MODULES}))
    assert len(load_file(adapter / TENSORS)) == 3 * 2 * len(ALL_MODULES)
    assert "not a tensor of a known module" in refusal(adapter)


def test_fused_modules_in_a_sum_with_their_parts_are_split(tmp_path: Path) -> None:
    phi3 = save_family(FAMILIES["phi3"], tmp_path / "phi3")
    modules = HuggingFaceModel(phi3).modules
    assert modules is not None
    fused = save_adapter(phi3, tmp_path / "fused", 0, r=3, target_modules=["qkv_proj", "o_proj", "gate_up_proj"])
    llama = save_model(ModelSpec(intermediate_size=38, num_hidden_layers=3), tmp_path / "llama")
    parts = save_adapter(llama, tmp_path / "parts", 1, r=2, target_modules=["k_proj", "up_proj", "down_proj"])
    modules_of_parts = HuggingFaceModel(llama).modules
    assert modules_of_parts is not None
    first, second = (
        Term(directory.name, convert_adapter(directory, storage_dtype="float32", modules=modules_of_parts), weight)
        for directory, weight in ((fused, 0.5), (parts, 2.0))
    )
    summed = weighted_sum([first, second], modules_of_parts, _core.DType.FLOAT32, 8)
    rows = {(layer, module): rank for module, layer, rank, _ in summed.config[0].tolist()}
    of_layer = {1: 3, 2: 5, 3: 3, 4: 3, 5: 3, 6: 2, 7: 5}
    assert rows == {(layer, module): rank for layer in range(3) for module, rank in of_layer.items()}
    expected = unfused(first, modules_of_parts)
    for key, change in unfused(second, modules_of_parts).items():
        expected[key] = expected.get(key, 0.0) + change
    found = unfused(Term("sum", summed, 1.0), modules_of_parts)
    assert found.keys() == expected.keys()
    for key, change in expected.items():
        np.testing.assert_allclose(found[key], change, rtol=0, atol=1e-6)


def unfused(term: Term, modules: AdaptedModules) -> dict[tuple[int, str], Any]:
    """Changes of the weights by a term: float32 [out, in] by layer and unfused module."""
    infos = _core.lora_modules()
    changes = {}
    for row, (module, layer, rank, _) in zip(term.adapter.weights[0], term.adapter.config[0].tolist(), strict=True):
        sizes = modules.sizes_of(layer, infos[module].name)
        assert sizes is not None
        a, b, _ = np.split(row, np.cumsum([rank * sizes[0], sizes[1] * rank]))
        change = term.weight * b.reshape(sizes[1], rank) @ a.reshape(rank, sizes[0])
        for part in infos[module].parts:
            outputs = modules.sizes_of(layer, part)
            assert outputs is not None
            changes[layer, part], change = change[: outputs[1]], change[outputs[1] :]
    return changes

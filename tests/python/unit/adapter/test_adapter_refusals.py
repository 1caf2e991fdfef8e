"""Adapters that cannot be served are refused; the error names every bad field or tensor."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest

from adaptrt import _core
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.adapter.peft_fields import FIELDS, KNOWN_PEFT
from adaptrt.formats.adapter.recognise import MAX_CONFIG_BYTES, recognise, refuse_lfs_pointer
from support.adapters import CONFIG, TENSORS, edit_config, edit_tensors
from support.models import ModelSpec, save_adapter, save_model

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(ModelSpec(), tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def saved_lora(model: Path, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("adapter") / "lora"
    return save_adapter(model, directory, 1, r=2, target_modules=["q_proj", "up_proj"])


@pytest.fixture
def lora(saved_lora: Path, tmp_path: Path) -> Path:
    """Makes a copy that a test may damage."""
    return shutil.copytree(saved_lora, tmp_path / "lora")


def refusal(directory: Path, **options) -> str:
    with pytest.raises(_core.AdapterError) as error:
        convert_adapter(directory, storage_dtype="float32", **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("peft_type", "OFT", "not served, because it multiplies the base's weights; accepted: LORA, ADALORA, VERA"),
        ("peft_type", "SHIRA", "not served, because its change of a weight is single elements; accepted: LORA"),
        ("peft_type", "MISS", "save_as_lora(path, model, rank) makes a LoRA of it, exact at rank = r unless"),
        ("peft_type", "A_TYPE_OF_THE_FUTURE", '"A_TYPE_OF_THE_FUTURE": not served; accepted: LORA'),
        ("peft_type", ["LORA"], "not served; accepted: LORA"),
        ("task_type", "SEQ_2_SEQ_LM", "an encoder and a decoder"),
        ("task_type", "TOKEN_CLS", "a classifier of tokens"),
        ("task_type", 5, "not a task of PEFT; accepted: CAUSAL_LM"),
        ("task_type", [], "not a task of PEFT; accepted: CAUSAL_LM"),
        ("task_type", "SEQ_CLS", "CAUSAL_LM"),
        ("bias", "vera_only", "accepted: none, all, lora_only"),
        ("enable_lora", [True, False, True], "merged linear layers"),
        ("lora_bias", "yes", "expected true or false"),
        ("modules_to_save", [3], "expected a list of names of modules"),
        ("layer_replication", [[0, 1], [0, 2]], "other layers"),
        ("trainable_token_indices", [1, 2, 1], "names a token twice"),
        ("trainable_token_indices", {"embed_tokens": [-1]}, "expected a list of tokens"),
        ("init_lora_weights", "pissa", "changed the base"),
        ("init_lora_weights", "pissa_niter_16", "changed the base"),
        ("init_lora_weights", "olora", "changed the base"),
        ("init_lora_weights", "corda", "changed the base"),
        ("init_lora_weights", "loftq", "quantised the base"),
        ("init_lora_weights", "lora_ga", "changed the base"),
        ("init_lora_weights", "something", "not a known initialisation"),
        ("init_lora_weights", 3, "not a known initialisation"),
        ("megatron_config", {"tensor_model_parallel_size": 2}, "Megatron"),
        ("use_qalora", True, "QALoRA"),
        ("alora_invocation_tokens", [], "expected a list of token ids"),
        ("target_parameters", "experts.gate_up_proj", "expected a list of names of parameters"),
        ("use_bdlora", {"nblocks": 2}, "block-diagonal"),
        ("arrow_config", {"top_k": 2}, "Arrow"),
        ("kasa_config", {"beta": 1e-3}, "KaSA"),
        ("velora_config", {"num_groups": 4}, "VeLoRA"),
        ("monteclora_config", {"num_samples": 4}, "MonteCLoRA"),
        ("a_field_of_the_future", 1, f"fields of PEFT up to 0.21, and the adapter is from PEFT {peft.__version__}"),
        ("a_field_of_the_future", {"x": None}, "an unknown field"),
        ("r", 0, "whole number from 1 to 2147483647"),
        ("r", 2.0, "whole number from 1 to 2147483647"),
        ("r", 10**300, "whole number from 1 to 2147483647"),
        ("r", True, "whole number from 1 to 2147483647"),
        ("lora_alpha", "16", "finite number"),
        ("lora_alpha", math.nan, "finite number"),
        ("lora_alpha", 10**400, "finite number"),
        ("rank_pattern", {"q_proj": 0}, "'q_proj': expected a whole number from 1 to 2147483647"),
        ("rank_pattern", ["q_proj"], "expected an object"),
        ("rank_pattern", {"(": 2}, "not a regular expression"),
        ("rank_pattern", {"(?i)q_proj": 2}, "'(?i' is not supported"),
        ("alpha_pattern", {"q_proj": None}, "'q_proj': expected a finite number"),
        ("alpha_pattern", {"q)(": 1}, "not a regular expression"),
        ("use_rslora", "yes", "true or false"),
        ("use_dora", 1, "true or false"),
        ("fan_in_fan_out", "false", "true or false"),
        ("target_modules", None, "expected a list"),
        ("target_modules", [], "at least one"),
        ("target_modules", "", "at least one"),
        ("target_modules", "all-linear", "give that list"),
        ("target_modules", "(q_proj", "not a regular expression"),
        ("target_modules", [1], "expected a list"),
        ("exclude_modules", 1, "expected a list"),
        ("layers_to_transform", [-1], "layer indices"),
        ("layers_to_transform", "0", "layer indices"),
        ("target_modules", ".*(q)?(?(1)_proj|x)", "'(?(' is not supported"),
        ("layers_pattern", [3], "name of a list of layers"),
        ("layers_pattern", "(a*)*", "name of a list of layers"),
        ("layers_pattern", "layers", "needs layers_to_transform"),
    ],
)
def test_fields(field: str, value, reason: str, lora: Path) -> None:
    edit_config(lora, **{field: value})
    text = refusal(lora)
    assert text.startswith(f"{lora / CONFIG}: {field} = ")
    assert reason in text


def test_a_module_that_was_saved_and_has_no_tensors(lora: Path) -> None:
    edit_config(lora, modules_to_save=["lm_head"])
    assert "modules_to_save names 'lm_head', but the file has no accepted weight of it" in refusal(lora)


def test_a_parameter_that_has_no_tensors(lora: Path) -> None:
    edit_config(lora, target_parameters=["feed_forward.experts.gate_up_proj"])
    assert "target_parameters names 'feed_forward.experts.gate_up_proj', but no tensor belongs to" in refusal(lora)


def test_a_scale_beyond_every_type(lora: Path) -> None:
    edit_config(lora, lora_alpha=1e300)
    text = refusal(lora)
    assert "q_proj.lora_B.weight', multiplied by its scale" in text
    assert "goes beyond float32" in text


@pytest.mark.parametrize("field", ["r", "lora_alpha", "target_modules"])
def test_required_fields(field: str, lora: Path) -> None:
    fields = json.loads((lora / CONFIG).read_text())
    del fields[field]
    (lora / CONFIG).write_text(json.dumps(fields))
    assert f"{field} is missing" in refusal(lora)


def test_layers_only_go_with_a_list_of_modules(lora: Path) -> None:
    edit_config(lora, target_modules=".*(q|up)_proj", layers_to_transform=[0])
    assert "layers_to_transform = [0]: only goes with" in refusal(lora)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task_type", None),
        ("bias", None),
        ("modules_to_save", []),
        ("layer_replication", []),
        ("lora_dropout", 0.3),
        ("inference_mode", False),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("loftq_config", {"loftq_bits": 4}),
        ("enable_lora", None),
        ("merge_weights", False),
        ("lorap_emb_lr", 1e-6),
        ("unsloth_version", "2026.3.3"),
        ("base_model_name_or_path", None),
        ("auto_mapping", {"base_model_class": "LlamaForCausalLM"}),
        ("init_lora_weights", False),
        ("init_lora_weights", "eva"),
        ("init_lora_weights", "orthogonal"),
        ("eva_config", {"rho": 2.0}),
        ("corda_config", {"corda_method": "kpm"}),
        ("ensure_weight_tying", True),
        ("qalora_group_size", 32),
        ("a_field_of_the_future", None),
        ("a_field_of_the_future", False),
        ("another_one", []),
        ("use_rslora", None),
        ("rank_pattern", None),
        ("alpha_pattern", {}),
        ("exclude_modules", ["v_proj"]),
        ("layers_to_transform", [0, 1]),
        ("layers_to_transform", []),
    ],
)
def test_values_without_effect(field: str, value, lora: Path) -> None:
    expected = convert_adapter(lora, storage_dtype="float32")
    edit_config(lora, **{field: value})
    np.testing.assert_array_equal(convert_adapter(lora, storage_dtype="float32").weights, expected.weights)


def test_every_field_of_the_installed_peft_is_accounted_for() -> None:
    """Checks every field of a new PEFT explicitly: none may fall under the rule for unknown fields."""
    configs = {
        "LORA": peft.LoraConfig,
        "ADALORA": peft.AdaLoraConfig,
        "VERA": peft.VeraConfig,
        "LOHA": peft.LoHaConfig,
        "LOKR": peft.LoKrConfig,
        "IA3": peft.IA3Config,
        "TRAINABLE_TOKENS": peft.TrainableTokensConfig,
    }
    assert configs.keys() == FIELDS.keys()
    for peft_type, config in configs.items():
        assert {field.name for field in dataclasses.fields(config)} <= FIELDS[peft_type].keys()
    assert peft.__version__.startswith(f"{KNOWN_PEFT}.")


def test_all_fields_are_reported_at_once(lora: Path) -> None:
    edit_config(lora, bias="some", lora_bias="some", init_lora_weights="other", r=-1)
    edit_tensors(
        lora, lambda tensors: {**tensors, "base_model.model.other.lm_head.weight": np.ones((3, 2), np.float32)}
    )
    text = refusal(lora)
    for expected in ('bias = "some"', 'lora_bias = "some"', 'init_lora_weights = "other"', "r = -1", "lm_head.weight"):
        assert expected in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected a JSON object"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 99999, "not JSON"),
    ],
)
def test_broken_config_files(content: bytes, reason: str, lora: Path) -> None:
    (lora / CONFIG).write_bytes(content)
    assert reason in refusal(lora)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("base_model.model.model.embed_tokens.weight", "replaces the base's weight, or is a copy of it"),
        (
            "base_model.model.reader.embed_tokens.weight",
            "are accepted only in PEFT adapters, under the model's own paths",
        ),
        ("base_model.model.model.embed_tokens.lora_A.weight", "embeddings have lora_embedding_A"),
        ("base_model.model.lm_head.lora_embedding_B", "linear layers have lora_A and lora_B"),
        ("base_model.model.transformer.wpe.lora_embedding_B", "only embeddings of tokens can be adapted"),
        (
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            "a row for each of 0 trained tokens",
        ),
        (PREFIX + "lora_B.bias", "expected [out]"),
        (PREFIX + "bias", "a trained bias, but adapter_config.json's bias is none"),
        (
            "base_model.model.model.layers.0.input_layernorm.bias",
            "for linear layers, and for norms if the model is known",
        ),
        ("base_model.model.model.layers.0.input_layernorm.weight", "normalisation"),
        ("base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_A.weight", "belongs to experts"),
        ("base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight", "belongs to experts"),
        ("base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight", "belongs to the vision tower"),
        ("base_model.model.model.audio_tower.layers.0.self_attn.q_proj.lora_A.weight", "layers of a decoder"),
        ("base_model.model.model.layers.0.cross_attn.q_proj.lora_A.weight", "layers of a decoder"),
        (PREFIX + "lora_diag", "variant of LoRA"),
        ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", "not a tensor of a known module"),
        ("base_model.model.model.layers.-1.self_attn.q_proj.lora_A.weight", "not a tensor of a known module"),
        ("base_model.model.model.layers.0.self_attn.z_proj.lora_A.weight", "not a tensor of a known module"),
        ("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", "not a tensor of a known module"),
        (PREFIX + "lora_C.weight", "not a tensor of a known module"),
        (PREFIX + "lora_A", "not a tensor of a known module"),
        ("other.layers.0.self_attn.q_proj.lora_A.weight", "not a tensor of a known module"),
    ],
)
def test_unknown_tensors(name: str, reason: str, lora: Path) -> None:
    edit_tensors(lora, lambda tensors: {**tensors, name: np.ones((2, 36), np.float32)})
    text = refusal(lora)
    assert f"{lora / TENSORS}: tensor '{name}': " in text
    assert reason in text


def replace(name: str, value: np.ndarray):
    return lambda tensors: {**tensors, PREFIX + name: value}


def drop(*names: str):
    return lambda tensors: {n: t for n, t in tensors.items() if n not in {PREFIX + name for name in names}}


ONES = np.ones((2, 36), np.float32)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (drop("lora_A.weight"), "', but no lora_A"),
        (drop("lora_B.weight"), "', but no lora_B"),
        (lambda tensors: {}, "holds no tensors"),
        (replace("lora_A.weight", np.ones((3, 36), np.float32)), "rank is 3 in lora_A [3, 36] and 2 in lora_B"),
        (replace("lora_A.weight", np.ones(72, np.float32)), "has the shape [72], expected [rank, in]"),
        (replace("lora_A.weight", np.ones((0, 36), np.float32)), "without a zero"),
        (replace("lora_B.weight", np.ones((1, 36, 2), np.float32)), "expected [out, rank]"),
        (replace("lora_A.weight", ONES.astype(np.int32)), "is int32; accepted: float32, float16, bfloat16, float64"),
        (replace("lora_A.weight", np.where(np.eye(2, 36) > 0, np.nan, ONES)), "2 of 72 values are NaN"),
        (replace("lora_B.weight", np.full((36, 2), np.inf, np.float16)), "72 of 72 values are NaN"),
        (replace("lora_B.weight", np.full((36, 2), 1e39)), "beyond float32"),
        (replace("lora_A.default.weight", ONES), "is the same as"),
        (
            lambda tensors: {**drop("lora_A.weight")(tensors), PREFIX + "lora_A.other.weight": ONES},
            "tensors of several adapters",
        ),
        (
            lambda tensors: {
                name.replace(".weight", ".one.weight" if "lora_A" in name else ".other.weight"): tensor
                for name, tensor in tensors.items()
            },
            "tensors of several adapters",
        ),
        (replace("lora_magnitude_vector", np.ones(36, np.float32)), "use_dora is not true"),
        (
            replace("lora_magnitude_vector", np.ones(35, np.float32)),
            "out is 36 in lora_B [36, 2] and 35 in magnitude [35]",
        ),
        (
            lambda t: {**t, **{n.replace("model.model.", "model."): v for n, v in t.items() if "q_proj" in n}},
            "are both attn_q of layer 0",
        ),
        (
            lambda t: {**t, **{n.replace("q_proj", "qkv_proj"): v for n, v in t.items() if "q_proj" in n}},
            "'model.layers.0.self_attn.qkv_proj' and its part 'model.layers.0.self_attn.q_proj'",
        ),
        (
            lambda t: {**t, **{n.replace("up_proj", "down_proj"): v for n, v in t.items() if "up_proj" in n}},
            "target_modules, exclude_modules and layers_to_transform leave it out",
        ),
    ],
)
def test_tensors(edit, reason: str, lora: Path) -> None:
    edit_tensors(lora, edit)
    assert reason in refusal(lora)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"exclude_modules": ["up_proj"]},
        {"exclude_modules": r".*layers\.1\..*"},
        {"layers_to_transform": [0]},
        {"layers_to_transform": [0, 1], "layers_pattern": ["h"]},
        {"target_modules": r"model\.layers\.\d+\.self_attn\.q_proj"},
    ],
)
def test_tensors_that_peft_would_not_load(fields: dict, lora: Path) -> None:
    edit_config(lora, **fields)
    assert "leave it out" in refusal(lora)


@pytest.mark.parametrize("fields", [{"r": 3}, {"rank_pattern": {"q_proj": 1}}])
def test_ranks_that_peft_would_not_load(fields: dict, lora: Path) -> None:
    edit_config(lora, **fields)
    text = refusal(lora)
    assert "'model.layers.0.self_attn.q_proj': the rank is 2 in lora_A, but" in text
    assert ("up_proj" in text) == ("r" in fields)


def test_dora_without_a_magnitude(model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "dora", 1, r=2, use_dora=True)
    edit_tensors(directory, drop("lora_magnitude_vector"))
    assert "'model.layers.0.self_attn.q_proj' has no DoRA magnitude" in refusal(directory, base=model)


def one_sentence(directory: Path, **options) -> str:
    text = refusal(directory, **options)
    assert "; tensor" not in text
    assert text.count(str(directory)) == 1
    return text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"r": 2, "target_modules": ["q_proj"]}, "peft_type is missing"),
        ({"config": {"r": 8}, "hidden_size": 36, "model_class": "LlamaForCausalLM"}, "is from AdapterHub"),
        (
            {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM"},
            "because it brings keys and values that belong to no token, and",
        ),
        ({"fine_tune_type": "full", "num_layers": 2}, "a whole model was trained"),
        (
            {"peft_type": "LORA", "auto_mapping": {"base_model_class": "LlamaForSequenceClassification"}},
            'auto_mapping says "LlamaForSequenceClassification": a classifier or the like',
        ),
    ],
)
def test_unsupported_adapters_are_refused_in_one_sentence(content: dict, sentence: str, lora: Path) -> None:
    (lora / CONFIG).write_text(json.dumps(content))
    edit_tensors(lora, lambda tensors: {**tensors, "score.weight": np.ones((3, 2), np.float32)})
    assert sentence in one_sentence(lora)


def test_a_git_lfs_pointer(lora: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
    (lora / TENSORS).write_text(pointer)
    assert f"{lora / TENSORS}: is a Git LFS pointer, not the file itself; run git lfs pull" == one_sentence(lora)
    (lora / CONFIG).write_text(pointer)
    assert f"{lora / CONFIG}: is a Git LFS pointer" in one_sentence(lora)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("adapters.safetensors", "an MLX-LM adapter needs the one that was written with adapters.safetensors"),
        ("adapters.npz", "adapters.npz is from an old MLX-LM"),
        ("config.json", "it holds a whole model, not an adapter"),
        ("README.md", "expected the directory of a PEFT or MLX-LM adapter"),
    ],
)
def test_directories_without_a_config(file: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"")
    assert f"{tmp_path}: has no {CONFIG}" in one_sentence(tmp_path)
    assert sentence in one_sentence(tmp_path)


def test_biases_of_lora_b_are_all_or_none(lora: Path) -> None:
    edit_config(lora, lora_bias=True)
    assert "has no bias of lora_B, but adapter_config.json's lora_bias is true" in refusal(lora)
    edit_config(lora, lora_bias=False)
    edit_tensors(lora, lambda tensors: tensors | {f"{PREFIX}lora_B.bias": np.ones(36, np.float32)})
    assert "has a bias of lora_B, but adapter_config.json's lora_bias is not true" in refusal(lora)


def test_many_tensors_of_one_reason_are_counted(lora: Path) -> None:
    norms = {f"base_model.model.model.layers.{layer}.norm.weight": np.ones(36, np.float32) for layer in range(9)}
    edit_tensors(lora, lambda tensors: tensors | norms)
    assert "9 tensors, such as 'base_model.model.model.layers.0.norm.weight', " in refusal(lora)


def test_a_config_is_bounded_before_it_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b"{" + b" " * MAX_CONFIG_BYTES)
    reason = f"it has {MAX_CONFIG_BYTES + 1} bytes; expected at most {MAX_CONFIG_BYTES}"
    with pytest.raises(_core.AdapterError, match=reason):
        recognise(tmp_path)


def test_a_fifo_in_place_of_weights_is_refused_without_waiting(tmp_path: Path) -> None:
    fifo = tmp_path / "adapter_model.safetensors"
    os.mkfifo(fifo)
    with pytest.raises(_core.AdapterError, match="it is a FIFO; expected a regular file"):
        refuse_lfs_pointer(fifo)

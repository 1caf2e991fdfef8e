"""Language models inside vision-language models: layouts of configs, tensors and adapters, and refused inputs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from adaptrt._core import AdapterError, CheckpointError, DType
from adaptrt.builder.cli import main
from adaptrt.builder.conversion.convert import Converted, convert_checkpoint
from adaptrt.formats.adapter import ConvertedAdapter, convert_adapter
from adaptrt.formats.adapter.dora import normalize_adapter
from adaptrt.formats.checkpoint.config import CheckpointConfig, ParallelMapping
from adaptrt.formats.checkpoint.rotary import LinearScaling, YarnScaling
from adaptrt.formats.hugging_face.hf_config import load_hf_config
from adaptrt.formats.models.registry import declare
from adaptrt.formats.network.adapter_sites import AdaptedModules
from support.adapters import TENSORS, edit_config, edit_tensors
from support.families import FAMILIES, RELATIVES, save_family
from support.models import save_adapter

SEEING = ("smolvlm", "idefics3")
"""Families whose images are served too: test_images.py. They have one layout."""
NAMES = [name for name, family in RELATIVES.items() if "vision_config" in family.fields and name not in SEEING]
ALL_FAMILIES = {**FAMILIES, **RELATIVES}


@pytest.fixture(scope="module", params=NAMES)
def model(request, tmp_path_factory) -> Path:
    return save_family(ALL_FAMILIES[request.param], tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def qwen2_5(tmp_path_factory) -> Path:
    return save_family(ALL_FAMILIES["qwen2.5-vl"], tmp_path_factory.mktemp("qwen2.5-vl") / "model")


def edited(model: Path, directory: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Copies a model and edits its config.json."""
    shutil.copytree(model, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    edit(config)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def renamed(model: Path, directory: Path, renamings: list[tuple[str, str]]) -> Path:
    """Copies a model and renames its tensors."""
    shutil.copytree(model, directory)
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        for pattern, replacement in renamings:
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    return directory


TO_TODAY = [
    (r"^(visual|vision_tower|multi_modal_projector)\.", r"model.\1."),
    (r"^language_model\.lm_head", "lm_head"),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^model\.(?=embed|layers|norm)", "model.language_model."),
]
TO_OLDER_QWEN = [(r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual.")]
TO_OLDER_LLAVA = [
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head", "language_model.lm_head"),
    (r"^model\.(?=vision|multi)", ""),
]


def read(model: Path) -> CheckpointConfig:
    return load_hf_config(model, dtype=DType.FLOAT32, mapping=ParallelMapping())


def weights_of(model: Path, directory: Path) -> tuple[Converted, bytes]:
    converted = convert_checkpoint(model, directory)
    return converted, (directory / "rank0.safetensors").read_bytes()


def test_tensors_of_both_layouts_are_one_model(model: Path, tmp_path: Path) -> None:
    """transformers saves most of these models with the older names."""
    today = renamed(model, tmp_path / "today", TO_TODAY)
    older = renamed(today, tmp_path / "older", TO_OLDER_QWEN if "qwen" in model.parent.name else TO_OLDER_LLAVA)
    names = set(load_file(today / "model.safetensors"))
    assert names.isdisjoint(set(load_file(older / "model.safetensors")) - {"lm_head.weight"})
    converted, weights = weights_of(today, tmp_path / "1")
    assert weights == weights_of(older, tmp_path / "2")[1] == weights_of(model, tmp_path / "3")[1]
    towers = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
    assert converted.left_out.num_vision == sum(name.startswith(towers) for name in names) > 0


@pytest.mark.parametrize("command", [["convert-checkpoint"], ["build", "--max_seq_len", "64"]])
def test_ignored_vision_tensors_are_reported(
    model: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*command, "--model_dir", str(model), "--output_dir", str(tmp_path / "made")]) == 0
    printed = capsys.readouterr().out
    assert "tensors of the vision tower; the engine only handles text" in printed
    reasons = ("the model has no preprocessor_config.json", "ForConditionalGeneration are not served")
    assert any(reason in printed for reason in reasons) == (command[0] == "build")


def test_a_tower_of_another_kind_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    model = save_family(ALL_FAMILIES["llava"], tmp_path / "model")
    siglip = edited(
        model, tmp_path / "siglip", lambda config: config["vision_config"].update(model_type="siglip_vision_model")
    )
    command = ["build", "--model_dir", str(siglip), "--output_dir", str(tmp_path / "engine"), "--max_seq_len", "64"]
    assert main(command) == 0
    assert "towers of 'siglip_vision_model' are not served" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.audio_tower.x", "visual_projection.x", "model.language_model.x"])
def test_other_tensors_are_refused(model: Path, name: str, tmp_path: Path) -> None:
    copy = edited(model, tmp_path / "model", lambda config: None)
    save_file({**load_file(model / "model.safetensors"), name: np.ones(3, np.float32)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"unexpected tensors: {name}"):
        convert_checkpoint(copy, tmp_path / "checkpoint")


def test_one_tensor_under_two_names_is_refused(model: Path, tmp_path: Path) -> None:
    copy = renamed(model, tmp_path / "model", TO_TODAY)
    older = "model.norm.weight" if "qwen" in model.parent.name else "language_model.model.norm.weight"
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, older: np.ones(36, np.float32)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"are both 'model\.language_model\.norm\.weight'"):
        convert_checkpoint(copy, tmp_path / "checkpoint")


def flat(config: dict[str, Any]) -> None:
    """Makes the layout before transformers 4.52, which the published models have."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config.update({**text, **config, "torch_dtype": config.pop("dtype"), "rope_theta": rope.pop("rope_theta")})
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}


def both(config: dict[str, Any]) -> None:
    """Makes the layout that transformers 4.52 to 4.56 saved."""
    text = config["text_config"]
    config.update({name: value for name, value in text.items() if name != "model_type"}, torch_dtype="float32")


@pytest.mark.parametrize("edit", [flat, both])
def test_older_configs_are_read(qwen2_5: Path, edit: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    assert read(edited(qwen2_5, tmp_path / "model", edit)) == read(qwen2_5)


def test_yarn_stays_yarn(qwen2_5: Path, tmp_path: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        flat(config)
        config["rope_scaling"].update(type="yarn", factor=4.0, original_max_position_embeddings=128)

    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=128)
    assert read(edited(qwen2_5, tmp_path / "model", edit)).rotary_scaling == scaling


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 3, 3]}},
            r"text_config\.rope_parameters\.mrope_section is \[1, 3, 3\]; expected three integers whose sum is half of "
            r"the head's rotated elements, 6",
        ),
        ({"rope_parameters": {"rope_type": "default"}}, r"mrope_section is \[\]; expected three integers"),
        ({"model_type": "qwen2_moe"}, r'text_config\.model_type is "qwen2_moe"; accepted: qwen2_5_vl_text'),
        ({"num_experts": 8}, r"text_config\.num_experts is 8: an unknown field"),
        ({"tie_word_embeddings": True}, r"text_config\.tie_word_embeddings is true, but tie_word_embeddings is false"),
    ],
)
def test_fields_that_cannot_be_used_are_refused(
    qwen2_5: Path, changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    copy = edited(qwen2_5, tmp_path / "model", lambda config: config["text_config"].update(changes))
    with pytest.raises(CheckpointError, match=complaint):
        read(copy)


def test_unknown_fields_beside_text_config_are_refused(qwen2_5: Path, tmp_path: Path) -> None:
    copy = edited(qwen2_5, tmp_path / "model", lambda config: config.update(audio_config={}))
    with pytest.raises(CheckpointError, match=r"config\.json: audio_config is \{\}: an unknown field"):
        read(copy)


def rename_adapter(adapter: Path, directory: Path, now: str, other: str) -> Path:
    shutil.copytree(adapter, directory)
    edit_tensors(directory, lambda tensors: {name.replace(now, other): tensor for name, tensor in tensors.items()})
    edit_config(directory, target_modules=["q_proj", "down_proj"])
    return directory


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_of_either_layout_are_one(model: Path, use_dora: bool, tmp_path: Path) -> None:
    # Trainers leave the vision tower out in this way.
    targets = r"^(?!.*(?:visual|vision_tower)).*(?:q_proj|down_proj).*"
    adapter = save_adapter(model, tmp_path / "adapter", 0, r=3, target_modules=targets, use_dora=use_dora)
    older_name = "model.model." if "qwen" in model.parent.name else "model.language_model.model."
    older = rename_adapter(adapter, tmp_path / "older", "model.model.language_model.", older_name)
    bare = rename_adapter(adapter, tmp_path / "bare", "model.model.language_model.", "model.")
    modules = AdaptedModules(declare(read(model)))

    def converted(directory: Path, **settings: Any) -> ConvertedAdapter:
        return convert_adapter(directory, storage_dtype="float32", **settings)

    expected = converted(adapter, base=model)
    assert expected.paths[0] == "model.language_model.layers.0.self_attn.q_proj"
    for directory in (adapter, older, bare):
        found = [converted(directory, base=model, modules=modules), converted(directory, base=model)]
        if use_dora:
            normalize_adapter(directory, tmp_path / f"normalized-{directory.name}", model)
            found.append(converted(tmp_path / f"normalized-{directory.name}"))
        else:
            found.append(converted(directory))
        for one in found:
            np.testing.assert_array_equal(one.weights, expected.weights)
            np.testing.assert_array_equal(one.config, expected.config)


def test_adapters_of_the_vision_tower_are_refused_by_name(qwen2_5: Path, tmp_path: Path) -> None:
    adapter = save_adapter(qwen2_5, tmp_path / "adapter", 0, r=3, target_modules=["q_proj", "down_proj"])
    assert any("visual" in name for name in load_file(adapter / TENSORS))
    complaint = (
        r"visual\.blocks\.0\.mlp\.down_proj\.lora_A\.weight': belongs to the vision tower; only the language model is "
        r"served, for text"
    )
    for modules in (None, AdaptedModules(declare(read(qwen2_5)))):
        with pytest.raises(AdapterError, match=complaint):
            convert_adapter(adapter, storage_dtype="float32", modules=modules)


def test_sizes_that_published_models_leave_to_transformers(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    config |= {"torch_dtype": "bfloat16", "text_config": text, "vision_config": {}, "mm_tokens_per_image": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours, theirs = read(tmp_path), transformers.Gemma3TextConfig(**text)
    assert (ours.head_size, ours.vocab_size, ours.query_pre_attn_scalar) == (256, 262208, theirs.query_pre_attn_scalar)
    assert (ours.num_attention_heads, ours.num_key_value_heads) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    assert (ours.norm_epsilon, ours.max_position_embeddings) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    windows = [layer for layer, kind in enumerate(theirs.layer_types) if kind == "sliding_attention"]
    assert (ours.sliding_window, list(ours.sliding_window_layers)) == (theirs.sliding_window, windows)
    parameters = theirs.rope_parameters
    assert ours.rotary_base == parameters["full_attention"]["rope_theta"]
    assert ours.rotary_local_base == parameters["sliding_attention"]["rope_theta"]
    assert ours.rotary_scaling == LinearScaling(factor=8.0)
    assert ours.eos_token_id == (1, 106)
    assert ours.share_embedding_table

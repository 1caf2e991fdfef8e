"""Adapters whose embeddings were resized to fewer tokens than the base has, against transformers and PEFT."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.tools.inspect_adapter import describe_adapter
from support.adapters import TENSORS, edit_config, edit_tensors
from support.kinds import save_kind
from support.models import Reference
from support.served_kinds import ServedKinds, engine_of
from support.serving import Answer, collect, make_request
from support.vocabularies import NAMES, lora_of, serve_kinds, vocabulary_of

FEWER = {"cut": -3, "tokens": -2, "whole": -4, "lora-of-both": -5}


def build_config() -> BuildConfig:
    return BuildConfig(
        max_batch_size=4,
        max_num_tokens=256,
        max_seq_len=96,
        max_beam_width=3,
        tokens_per_block=8,
        lora_config=LoraBuildConfig(max_lora_rank=40),
        plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
    )


def kinds(name: str) -> dict[str, Any]:
    embedding, layer = NAMES[name]
    lora = partial(lora_of, name)
    return {
        "plain": lora(layer, r=3),
        "cut": lora(layer, r=2),
        "tokens": lora(layer, r=2, trainable_token_indices=[5, vocabulary_of(name) - 3]),
        "whole": lora(layer, r=2, modules_to_save=["lm_head", embedding]),
        "lora-of-both": lora("lm_head", embedding, layer, r=6, lora_alpha=5),
    }


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def served(request, tmp_path_factory) -> ServedKinds:
    name = request.param
    return serve_kinds(name, tmp_path_factory.mktemp(name), kinds(name), build_config(), extra_tokens=FEWER)


@pytest.fixture
def executor(served: ServedKinds) -> Iterator[adaptrt.Executor]:
    config = adaptrt.ExecutorConfig(max_beam_width=3)
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, config) as made:
        for kind, directory in served.adapters.items():
            made.add_adapter(kind, directory)
        yield made


def ask(executor: adaptrt.Executor, kind: str | None, prompt: list[int], num_tokens: int = 4, **fields: Any) -> Answer:
    request = make_request(prompt, num_tokens, **fields)
    return collect(executor, executor.enqueue_request(request, adapter=kind))


def test_all_of_them_in_one_batch_are_what_peft_computes(served: ServedKinds) -> None:
    """The logits end at the end of the adapter's vocabulary."""
    served.check_against_peft()


def test_a_crowd_changes_no_bit(served: ServedKinds) -> None:
    served.check_crowd()


def test_tokens_that_the_adapter_lacks_are_refused(served: ServedKinds, executor: adaptrt.Executor) -> None:
    last = served.vocabulary - 1

    def refusal(kind: str | None, prompt: list[int], **fields: Any) -> str:
        with pytest.raises(adaptrt.RequestError) as error:
            ask(executor, kind, prompt, **fields)
        return str(error.value)

    ours = f"the vocabulary is 0 to {last - 3}, without the engine's last 3, which the adapter does not have"
    assert f"input_token_ids[1] is {last - 2}; {ours}" in refusal("cut", [3, last - 2])
    assert f"end_id is {last}; {ours}" in refusal("cut", [3], end_id=last)
    ask(executor, "cut", [3, last - 3])
    ask(executor, "plain", [3, last])
    ask(executor, None, [3, last])


def test_sampling_does_not_see_missing_tokens(served: ServedKinds, executor: adaptrt.Executor) -> None:
    size = served.vocabulary - 3
    bias = [0.0] * size
    bias[-1] = 1e4
    assert ask(executor, "cut", [3, 4], embedding_bias=bias).tokens == [size - 1] * 4
    sampled = ask(executor, "cut", [3, 4], 40, sampling_config=adaptrt.SamplingConfig(temperature=100.0, seed=5))
    assert max(sampled.tokens) < size
    assert sampled.generation_logits.shape[-1] == size
    widths = []

    def note(request_id: int, logits: Any, tokens: Any, stream: Any, client_id: Any) -> None:
        widths.append(logits.shape[-1])

    ask(executor, "cut", [3], 1, logits_post_processor=note)
    assert widths == [size]
    row = sampled.generation_logits[0].astype(np.float64)
    probability = row[sampled.tokens[0]] - row.max() - np.log(np.exp(row - row.max()).sum())
    assert abs(sampled.log_probs.generated[0] - probability) < 1e-4


def test_beams_are_those_of_transformers(served: ServedKinds, executor: adaptrt.Executor) -> None:
    expected = Reference(served.model, served.adapters["whole"], FEWER["whole"]).search([3, 4, 5], 3, max_new_tokens=5)
    request = adaptrt.Request(
        [3, 4, 5],
        5,
        sampling_config=adaptrt.SamplingConfig(beam_width=3),
        output_config=adaptrt.OutputConfig(exclude_input_from_output=True),
    )
    (response,) = executor.await_responses(executor.enqueue_request(request, adapter="whole"))
    assert not response.has_error(), response.error_msg
    assert [list(tokens) for tokens in response.result.output_token_ids] == [list(beam.tokens) for beam in expected]


def test_drafts_change_nothing(served: ServedKinds, executor: adaptrt.Executor) -> None:
    """The draft engine has the tokens that the adapter lacks."""
    draft = adaptrt.DraftTargetDecodingConfig(3, str(served.engine))
    config = adaptrt.ExecutorConfig(draft_target_decoding_config=draft)
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, config) as drafting:
        drafting.add_adapter("lora-of-both", served.adapters["lora-of-both"])
        for prompt in ([3, 4, 5], [7, 8], list(range(20, 40))):
            assert ask(drafting, "lora-of-both", prompt, 8).same_bits(ask(executor, "lora-of-both", prompt, 8))


def test_rows_and_what_is_said_of_them(served: ServedKinds) -> None:
    for kind in served.adapters:
        rows = np.asarray(served.lora(kind).config)[0]
        assert rows[rows[:, 0] == 30, 2].tolist() == ([-FEWER[kind]] if kind in FEWER else [])
    # Copies of the base's rows do not count as changes.
    assert not {26, 27} & set(np.asarray(served.lora("cut").config)[0, :, 0].tolist())
    assert describe_adapter(served.adapters["cut"], served.engine).absent_tokens == 3


def test_adapters_that_are_refused(served: ServedKinds, tmp_path: Path) -> None:
    def refusal(adapter: Path) -> str:
        with pytest.raises(adaptrt.AdapterError) as error:
            adaptrt.LoraConfig.from_peft(1, adapter, served.engine)
        return str(error.value)

    def copy_of(kind: str, to: str) -> Path:
        return Path(shutil.copytree(served.adapters[kind], tmp_path / to))

    vocabulary = served.vocabulary
    uneven = copy_of("whole", "uneven")
    of_head = [name for name in load_file(uneven / TENSORS) if ".lm_head." in name]
    edit_tensors(uneven, lambda tensors: {**tensors, **{name: tensors[name][:-1].copy() for name in of_head}})
    expected = f"has {vocabulary - 5} tokens, the base {vocabulary}, and other tensors {vocabulary - 4}"
    assert expected in refusal(uneven)
    beyond = copy_of("tokens", "beyond")
    edit_config(beyond, trainable_token_indices=[5, vocabulary - 1])
    assert f"has a row for token {vocabulary - 1}; expected at most {vocabulary - 3}" in refusal(beyond)
    dora = peft.LoraConfig(target_modules=["lm_head"], r=2, use_dora=True, task_type="CAUSAL_LM")
    made = save_kind(served.model, tmp_path / "dora", dora, 1, extra_tokens=-1)
    assert "has factors (DoRA or IA3); expected none with fewer tokens than the base" in refusal(made)


def with_new_embeddings(served: ServedKinds, directory: Path, count: int = 2, **changed: Any) -> tuple[Path, Path]:
    """Returns an adapter with vLLM's file of new embeddings, and the same adapter with PEFT's resized embeddings."""
    resized = save_kind(served.model, directory / "resized", lora_of("llama", "q_proj", r=2), 8, extra_tokens=count)
    tensors = load_file(resized / TENSORS)
    whole = {name: tensor for name, tensor in tensors.items() if "embed_tokens" in name or "lm_head" in name}
    rows = {
        "input_embeddings": next(tensor for name, tensor in whole.items() if "embed_tokens" in name)[-count:],
        "output_embeddings": next(
            (tensor for name, tensor in whole.items() if "lm_head" in name), next(iter(whole.values()))
        )[-count:],
    }
    beside = Path(shutil.copytree(resized, directory / "beside"))
    edit_tensors(beside, lambda found: {name: tensor for name, tensor in found.items() if name not in whole})
    kept = {name: np.ascontiguousarray(tensor) for name, tensor in {**rows, **changed}.items() if tensor is not None}
    save_file(kept, beside / "new_embeddings.safetensors")
    return beside, resized


def test_a_file_of_new_embeddings_is_new_tokens(served: ServedKinds, tmp_path: Path) -> None:
    """vLLM's file of new embeddings gives the same rows, bit for bit, as resized embeddings."""
    room = dataclasses.replace(build_config().lora_config, max_extra_tokens=2)
    engine = engine_of(served.model, tmp_path, dataclasses.replace(build_config(), lora_config=room))
    beside, resized = with_new_embeddings(served, tmp_path)
    ours, theirs = (adaptrt.LoraConfig.from_peft(1, directory, engine) for directory in (beside, resized))
    assert np.asarray(ours.config).tolist() == np.asarray(theirs.config).tolist()
    assert np.asarray(ours.weights).tobytes() == np.asarray(theirs.weights).tobytes()
    with pytest.raises(adaptrt.AdapterError, match="max_extra_tokens 0; build the engine with --max_extra_tokens 2"):
        adaptrt.LoraConfig.from_peft(1, beside, served.engine)
    with pytest.raises(adaptrt.AdapterError, match="rows of new tokens; give the base model"):
        adaptrt.formats.adapter.convert_adapter(beside, storage_dtype="float32")
    for number, (changed, reason) in enumerate(
        (
            ({"output_embeddings": None}, "has no tensor 'output_embeddings'"),
            ({"others": np.zeros((2, 3), np.float32)}, "tensor 'others' is unknown; accepted: input_embeddings"),
            ({"input_embeddings": np.zeros((2, 3), np.float32)}, "its rows have 3 elements"),
            ({"input_embeddings": np.zeros(3, np.float32)}, r"expected \[tokens, hidden size\]"),
            ({"input_embeddings": np.full((2, 3), np.nan, np.float32)}, "has NaN"),
        )
    ):
        wrong, _ = with_new_embeddings(served, tmp_path / str(number), **changed)
        with pytest.raises(adaptrt.AdapterError, match=reason):
            adaptrt.LoraConfig.from_peft(1, wrong, engine)
    both = Path(shutil.copytree(resized, tmp_path / "both"))
    shutil.copy(beside / "new_embeddings.safetensors", both)
    with pytest.raises(adaptrt.AdapterError, match="has new tokens, but adapter_model"):
        adaptrt.LoraConfig.from_peft(1, both, engine)

"""Tokens that adapters add to the base's vocabulary, against transformers and PEFT with resized embeddings."""

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
from safetensors.numpy import load_file

import adaptrt
from adaptrt._core import DType, QuantAlgo, cpu_kernels, lora_modules
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.tools.inspect_adapter import describe_adapter
from support.adapters import TENSORS, edit_config, edit_tensors
from support.kinds import save_kind
from support.models import ModelSpec, Reference, save_model
from support.served_kinds import ServedKinds, engine_of
from support.serving import Answer, collect, make_request
from support.vocabularies import NAMES, TIED, WITHOUT_BIAS, lora_of, serve_kinds, vocabulary_of

EXTRA = {"resized": 3, "other": 2, "tokens": 2, "whole": 4, "lora-of-both": 5, "tied": 1}
MOST = max(EXTRA.values())


def build_config(max_extra_tokens: int = MOST, max_lora_rank: int = 40) -> BuildConfig:
    return BuildConfig(
        max_batch_size=4,
        max_num_tokens=256,
        max_seq_len=96,
        max_beam_width=3,
        tokens_per_block=8,
        lora_config=LoraBuildConfig(max_lora_rank=max_lora_rank, max_extra_tokens=max_extra_tokens),
        plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
    )


def kinds(name: str) -> dict[str, Any]:
    embedding, layer = NAMES[name]
    vocabulary = vocabulary_of(name)
    lora = partial(lora_of, name)
    made = {
        "plain": lora(layer, r=3),
        "resized": lora(layer, r=2),
        "other": lora(layer, r=4),
        "tokens": lora(layer, r=2, trainable_token_indices=[5, vocabulary, vocabulary + 1]),
        "whole": lora(layer, r=2, modules_to_save=["lm_head", embedding]),
    }
    made["lora-of-both"] = lora("lm_head", embedding, layer, r=6, lora_alpha=5)
    if name == "gemma2":
        made["tied"] = lora(layer, r=2, modules_to_save=[embedding], ensure_weight_tying=True)
    return made


@pytest.fixture(scope="module", params=WITHOUT_BIAS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(name: str, tmp_path_factory) -> ServedKinds:
    return serve_kinds(name, tmp_path_factory.mktemp(name), kinds(name), build_config(), extra_tokens=EXTRA)


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


def test_one_id_is_another_token_in_another_adapter(served: ServedKinds, executor: adaptrt.Executor) -> None:
    """The prompts are equal, so a cache could confuse their blocks."""
    new = served.vocabulary
    prompt = [*range(2, 14), new, new + 1, *range(2, 14)]
    first = {kind: ask(executor, kind, prompt) for kind in ("resized", "other", "whole")}
    assert not first["resized"].same_bits(first["other"])
    for kind in ("whole", "resized", "other"):
        assert ask(executor, kind, prompt).same_bits(first[kind])
    executor.add_adapter("resized", served.adapters["other"], replace=True)
    assert ask(executor, "resized", prompt).same_bits(first["other"])
    executor.add_adapter("resized", served.adapters["resized"], replace=True)
    assert ask(executor, "resized", prompt).same_bits(first["resized"])


def test_the_base_and_others_are_those_of_an_engine_without_room(served: ServedKinds, tmp_path: Path) -> None:
    """Compares the answers bit for bit."""
    without = ServedKinds(
        served.model,
        engine_of(served.model, tmp_path, build_config(max_extra_tokens=0)),
        {"plain": served.adapters["plain"]},
        vocabulary=served.vocabulary,
    )
    cases = [(kind, prompt) for kind, prompt in served.cases() if kind in (None, "plain")]
    for ours, theirs in zip(served.answers(cases), without.answers(cases), strict=True):
        assert ours.same_bits(theirs)
    config = (without.engine / "config.json").read_text()
    assert "max_extra_tokens" not in config
    assert b"max_extra_tokens" not in (without.engine / "rank0.engine").read_bytes()


def test_tokens_that_the_adapter_does_not_bring_are_refused(served: ServedKinds, executor: adaptrt.Executor) -> None:
    new = served.vocabulary

    def refusal(kind: str | None, prompt: list[int], **fields: Any) -> str:
        with pytest.raises(adaptrt.RequestError) as error:
            ask(executor, kind, prompt, **fields)
        return str(error.value)

    for kind in (None, "plain"):
        assert (
            f"input_token_ids[1] is {new}; the vocabulary is 0 to {new - 1}, and the request's adapter brings no more"
            in refusal(kind, [3, new])
        )
    ours = f"the vocabulary is 0 to {new + 1}, the last 2 of which the adapter adds"
    assert f"input_token_ids[0] is {new + 2}; {ours}" in refusal("other", [new + 2])
    assert f"end_id is {new + 2}; {ours}" in refusal("other", [3], end_id=new + 2)
    assert f"stop_words[0][0] is {new + 2}; {ours}" in refusal("other", [3], stop_words=[[new + 2]])
    assert f"bad_words[0] has token {new + 2}; the vocabulary has {new + 2} tokens" in refusal(
        "other", [3], bad_words=[[new + 2]]
    )
    lora = served.lora("other")
    moved = adaptrt.LoraConfig(90, lora.weights, lora.config, active_from=1)
    with pytest.raises(adaptrt.RequestError, match="active_from is 1; accepted: 0, the adapter brings tokens"):
        executor.enqueue_request(make_request([3, 4], 1, moved))
    # A refused request leaves nothing in the cache.
    assert 90 not in [entry.task_id for entry in executor.list_adapters()]
    request_id = executor.enqueue_request(
        make_request([3], 1, adaptrt.LoraConfig(91, lora.weights, lora.config), embedding_bias=[0.0] * new)
    )
    (response,) = executor.await_responses(request_id)
    assert f"accepted: [{new + 2}]" in response.error_msg


def test_sampling_options_accept_new_tokens(served: ServedKinds, executor: adaptrt.Executor) -> None:
    new, prompt = served.vocabulary, [3, 4, served.vocabulary, 5]

    def bias(**values: float) -> list[float]:
        row = [0.0] * (new + 2)
        for token, value in values.items():
            row[new + int(token[1:])] = value
        return row

    drawn = ask(executor, "other", prompt, embedding_bias=bias(t1=1e4))
    assert drawn.tokens == [new + 1] * 4
    free = ask(executor, "other", [*prompt, *drawn.tokens[:-1]], 1)
    # Log probs come from a softmax over the vocabulary and the new tokens.
    row = drawn.generation_logits[-1].astype(np.float64)
    log_sum = np.log(np.exp(row - row.max()).sum()) + row.max()
    assert abs(drawn.log_probs.generated[-1] - (row[new + 1] - log_sum)) < 1e-4
    assert free.context_logits[-1].tobytes() == drawn.generation_logits[-1].tobytes()
    # Each of these options excludes the second new token in a different way.
    both = bias(t0=1e4, t1=2e4)
    assert ask(executor, "other", prompt, embedding_bias=both).tokens == [new + 1] * 4
    assert ask(executor, "other", prompt, embedding_bias=both, bad_words=[[new + 1]]).tokens == [new] * 4
    assert ask(executor, "other", prompt, embedding_bias=both, bad_words=[[new + 1, new + 1]]).tokens == [
        new + 1, new, new + 1, new,
    ]  # fmt: skip
    sampling = adaptrt.SamplingConfig(no_repeat_ngram_size=1)
    tokens = ask(executor, "other", [3], embedding_bias=both, sampling_config=sampling).tokens
    assert tokens[:2] == [new + 1, new]
    assert not {new, new + 1} & set(tokens[2:])
    penalised = adaptrt.SamplingConfig(frequency_penalty=1.5e4)
    assert ask(executor, "other", [3], embedding_bias=both, sampling_config=penalised).tokens[:2] == [new + 1, new]
    # New tokens can be end tokens.
    ended = ask(executor, "other", prompt, embedding_bias=both, end_id=new + 1)
    assert not ended.tokens
    assert ended.finish_reason is adaptrt.FinishReason.END_ID
    stopped = ask(executor, "other", prompt, embedding_bias=both, stop_words=[[new + 1, new + 1]])
    assert stopped.tokens == [new + 1] * 2
    assert stopped.finish_reason is adaptrt.FinishReason.STOP_WORDS


def test_drafts_of_new_tokens_change_nothing(served: ServedKinds, executor: adaptrt.Executor) -> None:
    new = served.vocabulary
    prompt = [3, new, new + 1, 4, new, new + 1]
    plain = ask(executor, "other", prompt, 6)
    lookahead = adaptrt.LookaheadDecodingConfig(2, 3, 4)
    assert ask(executor, "other", prompt, 6, lookahead_config=lookahead).same_bits(plain)
    external = adaptrt.ExternalDraftTokensConfig([new + 1, *plain.tokens[:2]])
    assert ask(executor, "other", prompt, 6, external_draft_tokens_config=external).same_bits(plain)


def test_a_draft_engine_does_not_know_new_tokens(served: ServedKinds, executor: adaptrt.Executor) -> None:
    new = served.vocabulary
    cases = [("other", [3, new, 4, new + 1]), ("plain", [3, 4, 5]), (None, [6, 7])]
    config = adaptrt.ExecutorConfig(
        draft_target_decoding_config=adaptrt.DraftTargetDecodingConfig(3, str(served.engine))
    )
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, config) as drafting:
        for kind in ("other", "plain"):
            drafting.add_adapter(kind, served.adapters[kind])
        ids = [drafting.enqueue_request(make_request(prompt, 6), adapter=kind) for kind, prompt in cases]
        for (kind, prompt), request_id in zip(cases, ids, strict=True):
            assert collect(drafting, request_id).same_bits(ask(executor, kind, prompt, 6)), kind


def test_beams_are_those_of_transformers(served: ServedKinds, executor: adaptrt.Executor) -> None:
    prompt = [3, served.vocabulary, 4, served.vocabulary + 1]
    expected = Reference(served.model, served.adapters["other"], EXTRA["other"]).search(prompt, 3, max_new_tokens=5)
    request = adaptrt.Request(
        prompt,
        5,
        sampling_config=adaptrt.SamplingConfig(beam_width=3),
        output_config=adaptrt.OutputConfig(exclude_input_from_output=True),
    )
    (response,) = executor.await_responses(executor.enqueue_request(request, adapter="other"))
    assert not response.has_error(), response.error_msg
    assert [list(tokens) for tokens in response.result.output_token_ids] == [list(beam.tokens) for beam in expected]


def test_post_processors_see_the_adapters_rows(served: ServedKinds, executor: adaptrt.Executor) -> None:
    widths = []

    def note(request_id: int, logits: Any, tokens: Any, stream: Any, client_id: Any) -> None:
        widths.append(logits.shape[-1])
        logits[..., -1] = 1e4

    new = served.vocabulary
    assert ask(executor, "other", [3, new], 2, logits_post_processor=note).tokens == [new + 1] * 2
    assert ask(executor, "plain", [3], 1, logits_post_processor=note).tokens == [new - 1]
    assert widths == [new + 2, new + 2, new]


def test_rows_are_the_new_tokens_alone(name: str, served: ServedKinds) -> None:
    ids = {info.id: info.name for info in lora_modules()}
    rows = {
        kind: {ids[module]: rank for module, _, rank, _ in np.asarray(served.lora(kind).config)[0].tolist()}
        for kind in served.adapters
    }
    for kind, ranks in rows.items():
        assert ranks.get("new_tokens", 0) == EXTRA.get(kind, 0)
    # Copies of the base's rows do not count as changes.
    assert not {"lm_head", "embedding"} & set(rows["resized"])
    assert rows["tokens"]["embedding"] == 1
    description = describe_adapter(served.adapters["resized"], served.engine)
    assert description.new_tokens == EXTRA["resized"]
    assert description.engine_limits["max_extra_tokens"] == MOST


def test_an_engine_without_room_says_what_makes_it(served: ServedKinds, tmp_path: Path) -> None:
    few = engine_of(served.model, tmp_path, build_config(max_extra_tokens=2))
    adaptrt.LoraConfig.from_peft(1, served.adapters["other"], few)
    reason = (
        f"it brings 3 tokens beyond the base's vocabulary of {served.vocabulary}, above max_extra_tokens 2; "
        "build the engine with --max_extra_tokens 3"
    )
    with pytest.raises(adaptrt.AdapterError, match=reason):
        adaptrt.LoraConfig.from_peft(1, served.adapters["resized"], few)
    with pytest.raises(adaptrt.AdapterError, match=reason):
        describe_adapter(served.adapters["resized"], few)
    lora = served.lora("resized")
    with (
        adaptrt.Executor(few, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor,
        pytest.raises(adaptrt.AdapterError, match="its number of new tokens is 3; accepted: 1 to"),
    ):
        executor.enqueue_request(make_request([3], 1, lora))
    config = build_config(max_extra_tokens=2)
    carrying = dataclasses.replace(config.lora_config, lora_dir=(served.adapters["resized"],))
    with pytest.raises(adaptrt.AdapterError, match=reason):
        engine_of(served.model, tmp_path / "carrying", dataclasses.replace(config, lora_config=carrying))


def test_adapters_that_are_refused(name: str, served: ServedKinds, tmp_path: Path) -> None:
    new = served.vocabulary
    embedding, _ = NAMES[name]

    def refusal(adapter: Path) -> str:
        with pytest.raises(adaptrt.AdapterError) as error:
            adaptrt.LoraConfig.from_peft(1, adapter, served.engine)
        return str(error.value)

    def copy_of(kind: str, to: str) -> Path:
        return Path(shutil.copytree(served.adapters[kind], tmp_path / to))

    without = copy_of("whole", "without")
    of_head = [tensor for tensor in load_file(without / TENSORS) if ".lm_head." in tensor]
    for tokens, has in ((new, 0), (new + 3, 3)):
        cut = copy_of("whole", f"cut-{has}")
        edit_tensors(
            cut,
            lambda tensors, tokens=tokens: tensors | {name: tensors[name][:tokens].copy() for name in of_head},
        )
        assert f"has {new + has} tokens, the base {new}, and other tensors {new + 4}" in refusal(cut)
    edit_config(without, modules_to_save=[embedding])
    edit_tensors(without, lambda tensors: {name: value for name, value in tensors.items() if name not in of_head})
    reason = f"its file has no row of 'lm_head' for token {new} and 3 more; save the adapter with save_embedding_layers"
    if name not in TIED:
        assert reason in refusal(without)
    invoked = copy_of("resized", "invoked")
    edit_config(invoked, alora_invocation_tokens=[3, 4])
    assert "it brings new tokens, but it is an aLoRA" in refusal(invoked)
    dora = peft.LoraConfig(target_modules=["lm_head", embedding], r=2, use_dora=True, task_type="CAUSAL_LM")
    made = save_kind(served.model, tmp_path / "dora", dora, 1, extra_tokens=1)
    assert "has factors (DoRA or IA3); expected none with new tokens" in refusal(made)


def test_no_weighted_sum_has_new_tokens(executor: adaptrt.Executor) -> None:
    with pytest.raises(adaptrt.AdapterError, match="'resized' has trained tokens or whole weights"):
        ask(executor, "plain:0.5+resized:0.5", [3])


def test_engines_that_have_no_room_for_them(served: ServedKinds, tmp_path: Path) -> None:
    config = build_config(max_extra_tokens=-1)
    with pytest.raises(adaptrt.ConfigError, match="max_extra_tokens is -1; it must be 0 to 65536"):
        engine_of(served.model, tmp_path, config)
    plain = dataclasses.replace(build_config(), plugin_config=PluginConfig())
    with pytest.raises(adaptrt.ConfigError, match="max_extra_tokens needs lora_plugin"):
        build(served.model.parent / "checkpoint", plain, tmp_path / "engine")


STORED = {
    "bfloat16": (DType.BFLOAT16, None, 0.06),
    "float16": (DType.FLOAT16, None, 0.01),
    "w8a8": (DType.BFLOAT16, QuantConfig(quant_algo=QuantAlgo.W8A8), 0.1),
    "w4a16": (DType.BFLOAT16, QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=32), None),
}
"""Engine types with their tolerance relative to the range of float32 logits; 4-bit weights have no useful tolerance."""


@pytest.mark.parametrize("stored", list(STORED))
def test_other_types_of_engines(stored: str, tmp_path: Path) -> None:
    """More new tokens than a panel has columns, with every kernel table."""
    dtype, quantization, tolerance = STORED[stored]
    model = save_model(ModelSpec(hidden_size=96, head_dim=24, intermediate_size=70, vocab_size=97), tmp_path / "model")
    adapter = save_kind(model, tmp_path / "adapter", lora_of("llama", "q_proj", r=2), 1, extra_tokens=70)
    convert_checkpoint(model, tmp_path / "checkpoint", dtype=dtype, quantization=quantization)
    build(tmp_path / "checkpoint", build_config(max_extra_tokens=70), tmp_path / "engine")
    lora = adaptrt.LoraConfig.from_peft(1, adapter, tmp_path / "engine")
    prompts = [[3, 97, 4, 166, 98], [5, 6, 130], [7, 8, 9, 166], list(range(90, 160))]
    for kernels in cpu_kernels():
        config = adaptrt.ExecutorConfig(kernels=kernels, enable_chunked_context=True, max_num_tokens=48)
        with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, config) as executor:
            requests = [make_request(prompt, 4, lora) for prompt in prompts]
            requests += [make_request([token % 97 for token in prompt], 4) for prompt in prompts]
            together = [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]
            for request, answer in zip(requests, together, strict=True):
                assert collect(executor, executor.enqueue_request(request)).same_bits(answer), kernels
        for prompt, answer in zip(prompts, together, strict=False):
            expected = Reference(model, adapter, 70).logits(prompt).numpy()
            assert answer.context_logits.shape == expected.shape
            error = np.abs(answer.context_logits - expected).max() / (expected.max() - expected.min())
            assert tolerance is None or error <= tolerance, kernels

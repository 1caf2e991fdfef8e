"""Adapters that divide rotary positions, against PEFT on transformers with linear scaling by that factor."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.engine.problems import problems_of
from adaptrt.formats.checkpoint.config import ParallelMapping
from adaptrt.formats.checkpoint.rotary import LinearScaling
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig, TensorRtBuildConfig
from adaptrt.formats.models.registry import load_config
from adaptrt.tools.inspect_adapter import describe_adapter
from support.adapters import edit_config
from support.families import FAMILIES, rope, save_family
from support.models import ModelSpec, Reference, save_adapter, save_model
from support.ranks import answers_of_ranks
from support.served_kinds import FLOAT32_TOLERANCE, engine_of
from support.serving import Answer, collect, make_request

POSITIONS = 40
FACTORS = (2, 4)
# The context_length in each adapter's config, and the factor that its positions are divided by.
ADAPTERS = {"plain": (0, 1), "short": (POSITIONS, 1), "doubled": (POSITIONS + 1, 2), "longest": (4 * POSITIONS, 4)}
LAYERS = {"llama": "q_proj", "gpt-neox": "query_key_value", "glm": "q_proj", "smollm3": "q_proj"}
"""Four cases of rotation: plain, only part of each head, interleaved, and layers without rotation."""


def build_config(factors: tuple[int, ...] = FACTORS, **fields: Any) -> BuildConfig:
    return BuildConfig(
        max_batch_size=8,
        max_num_tokens=256,
        tokens_per_block=8,
        lora_config=LoraBuildConfig(max_lora_rank=8, long_lora_scaling_factors=factors),
        plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
        **fields,
    )


@dataclasses.dataclass(frozen=True)
class Served:
    """A model of POSITIONS positions, its engine and its adapters."""

    model: Path
    engine: Path
    adapters: dict[str, Path]

    def reference(self, name: str | None) -> Reference:
        """Returns a reference whose config scales positions like the adapter."""
        if name is None:
            return Reference(self.model)
        factor = ADAPTERS[name][1]
        scaled = self.model.parent / f"scaled-{factor}"
        if not scaled.exists():
            shutil.copytree(self.model, scaled)
            config = json.loads((scaled / "config.json").read_text())
            if factor > 1:
                config["rope_parameters"] |= {"rope_type": "linear", "factor": float(factor)}
            (scaled / "config.json").write_text(json.dumps(config))
        return Reference(scaled, self.adapters[name])

    def lora(self, name: str) -> adaptrt.LoraConfig:
        return adaptrt.LoraConfig.from_peft(list(ADAPTERS).index(name), self.adapters[name], self.engine)

    def cases(self) -> list[tuple[str | None, list[int]]]:
        """Returns a prompt close to each adapter's own limit, and one short prompt with every adapter."""
        rng = np.random.default_rng(4)
        longest = [(None, POSITIONS - 6), *((name, factor * POSITIONS - 6) for name, (_, factor) in ADAPTERS.items())]
        prompts = [(name, rng.integers(2, 61, length).tolist()) for name, length in longest]
        return [*prompts, *((name, list(range(3, 30))) for name in (*ADAPTERS, None))]

    def answers(self, cases: list[tuple[str | None, list[int]]], **fields: Any) -> list[Answer]:
        """Returns the answers to all cases in one batch."""
        config = adaptrt.ExecutorConfig(**fields)
        with adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
            loras = {name: self.lora(name) for name in ADAPTERS}
            requests = [make_request(prompt, 6, None if name is None else loras[name]) for name, prompt in cases]
            return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]


def serve(family: str, directory: Path) -> Served:
    if family == "llama":
        model = save_model(ModelSpec(max_position_embeddings=POSITIONS), directory / "model")
    else:
        known = FAMILIES[family]
        fields = {**known.fields, "max_position_embeddings": POSITIONS}
        model = save_family(dataclasses.replace(known, fields=fields), directory / "model")
    adapters = {}
    for seed, (name, (length, _)) in enumerate(ADAPTERS.items()):
        dora = {"use_dora": True} if name == "doubled" else {}
        targets = [LAYERS[family]]
        adapters[name] = save_adapter(model, directory / name, seed, strength=3.0, r=4, target_modules=targets, **dora)
        if length:
            edit_config(adapters[name], context_length=length)
    return Served(model, engine_of(model, directory, build_config()), adapters)


@pytest.fixture(scope="module", params=LAYERS)
def served(request, tmp_path_factory) -> Served:
    return serve(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Served:
    return serve("llama", tmp_path_factory.mktemp("alone"))


@pytest.fixture
def executor(llama: Served) -> Iterator[adaptrt.Executor]:
    with adaptrt.Executor(llama.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as made:
        yield made


def test_all_of_them_in_one_batch_are_what_peft_computes(served: Served) -> None:
    """Prompts exceed the base's positions, and another factor would exceed the tolerance by far."""
    cases = served.cases()
    for (name, prompt), answer in zip(cases, served.answers(cases), strict=True):
        expected = served.reference(name).logits(prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        scale = expected.max() - expected.min()
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * scale, name
        assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist(), name
        if name in ("doubled", "longest"):
            unscaled = Reference(served.model, served.adapters[name]).logits(prompt).numpy()
            assert np.abs(unscaled - answer.context_logits).max() > 0.005 * scale, name


def test_a_crowd_changes_no_bit(served: Served) -> None:
    cases = served.cases()
    together = served.answers(cases, enable_chunked_context=True, max_num_tokens=32, num_threads=2)
    for case, answer in zip(cases, together, strict=True):
        (alone,) = served.answers([case], num_threads=1)
        assert answer.same_bits(alone), case[0]


def test_no_block_is_shared_with_one_that_is_turned_otherwise(llama: Served, executor: adaptrt.Executor) -> None:
    """One prompt with the same tensors with and without the factor, and with the base."""
    scaled, prompt = llama.lora("longest"), list(range(3, 36))
    rows = np.asarray(scaled.config)[0]
    plain = adaptrt.LoraConfig(50, np.asarray(scaled.weights)[:, :-1], rows[np.newaxis, :-1])

    def ask(lora: adaptrt.LoraConfig | None) -> Answer:
        return collect(executor, executor.enqueue_request(make_request(prompt, 3, lora)))

    first = [ask(lora) for lora in (None, scaled, plain)]
    assert len({answer.context_logits.tobytes() for answer in first}) == 3
    for lora, answer in zip((plain, None, scaled), (first[2], first[0], first[1]), strict=True):
        assert ask(lora).same_bits(answer)
    # An adapter that is replaced in place changes the task's positions.
    replaced = adaptrt.LoraConfig(50, scaled.weights, scaled.config, replace=True)
    assert ask(replaced).same_bits(first[1])
    assert ask(adaptrt.LoraConfig(50)).same_bits(first[1])


def test_how_long_requests_may_be(llama: Served, executor: adaptrt.Executor) -> None:
    def refusal(lora: adaptrt.LoraConfig | None, length: int, num_tokens: int) -> str:
        with pytest.raises(adaptrt.RequestError) as error:
            executor.enqueue_request(make_request([3] * length, num_tokens, lora))
        return str(error.value)

    assert executor.engine_info.max_seq_len == 4 * POSITIONS
    own = ", and more with an adapter that divides them"
    for lora in (None, llama.lora("plain"), llama.lora("short")):
        assert f"the model has {POSITIONS} positions{own}" in refusal(lora, POSITIONS - 2, 3)
    reason = f"the model has {2 * POSITIONS} positions under an adapter that divides them by 2"
    assert reason in refusal(llama.lora("doubled"), 2 * POSITIONS, 1)
    assert f"the engine's max_seq_len is {4 * POSITIONS}" in refusal(llama.lora("longest"), 4 * POSITIONS, 1)
    # The limit also holds for a request that gives only the task_id.
    collect(executor, executor.enqueue_request(make_request([3] * (2 * POSITIONS - 1), 1, llama.lora("doubled"))))
    task = adaptrt.LoraConfig(llama.lora("doubled").task_id)
    assert reason in refusal(task, 2 * POSITIONS, 1)
    collect(executor, executor.enqueue_request(make_request([3] * (2 * POSITIONS - 1), 1, task)))


def test_drafts_change_nothing(llama: Served, executor: adaptrt.Executor) -> None:
    """Lookahead drafts and a draft engine, whose adapter may scale positions differently."""
    draft = adaptrt.DraftTargetDecodingConfig(3, str(llama.engine))
    config = adaptrt.ExecutorConfig(draft_target_decoding_config=draft)
    prompts = {None: [*range(3, 20)] * 2, "doubled": [*range(3, 20)] * 4, "longest": [*range(3, 33)] * 5}
    with adaptrt.Executor(llama.engine, adaptrt.ModelType.DECODER_ONLY, config) as drafting:
        for name, prompt in prompts.items():
            lora = None if name is None else llama.lora(name)
            plain = collect(executor, executor.enqueue_request(make_request(prompt, 6, lora)))
            for draft_lora in (None, lora):
                request = make_request(prompt, 6, lora, draft_lora_config=draft_lora)
                assert collect(drafting, drafting.enqueue_request(request)).same_bits(plain), name
            lookahead = adaptrt.LookaheadDecodingConfig(2, 3, 4)
            request = make_request(prompt, 6, lora, lookahead_config=lookahead)
            assert collect(executor, executor.enqueue_request(request)).same_bits(plain), name


def test_ranks_divide_positions_alike(llama: Served, tmp_path: Path) -> None:
    """Two stages give the same bits as one process."""
    cases = [
        {
            "adapter": None if name is None else str(llama.adapters[name]),
            "task": number,
            "prompt": prompt,
            "tokens": 6,
        }
        for number, (name, prompt) in enumerate(llama.cases())
    ]
    convert_checkpoint(llama.model, tmp_path / "checkpoint", pp_size=2)
    build(tmp_path / "checkpoint", build_config(), tmp_path / "engine")
    (expected,) = answers_of_ranks(1, llama.engine, [cases], tmp_path)
    (answers,) = answers_of_ranks(2, tmp_path / "engine", [cases], tmp_path)
    for case, answer, by_one in zip(cases, answers, expected, strict=True):
        assert answer.same_bits(by_one), case


def test_rows_and_what_is_said_of_them(llama: Served, executor: adaptrt.Executor) -> None:
    ids = {info.name: info.id for info in adaptrt._core.lora_modules() if info.is_setting}
    assert ids == {"rotary_scaling": 29, "absent_tokens": 30}
    assert np.asarray(llama.lora("longest").config)[0, -1].tolist() == [29, 0, 4, 0]
    assert not np.asarray(llama.lora("longest").weights)[0, -1].any()
    assert 29 not in np.asarray(llama.lora("short").config)[0, :, 0]
    described = describe_adapter(llama.adapters["doubled"], llama.engine)
    assert described.rotary_factor == 2
    assert described.engine_limits["long_lora_scaling_factors"] == list(FACTORS)
    assert describe_adapter(llama.adapters["short"], llama.engine).rotary_factor is None

    lora = llama.lora("doubled")
    weights, config = np.asarray(lora.weights), np.asarray(lora.config)

    def refusal(row: list[int], *, weights: Any = weights, **fields: Any) -> str:
        changed = config.copy()
        changed[0, -1] = row
        with pytest.raises((adaptrt.AdapterError, adaptrt.RequestError)) as error:
            executor.enqueue_request(make_request([3, 4], 1, adaptrt.LoraConfig(70, weights, changed, **fields)))
        return str(error.value)

    assert "it divides rotary positions by 3; the engine's long_lora_scaling_factors are 2, 4" in refusal([29, 0, 3, 0])
    assert "it divides rotary positions by -2" in refusal([29, 0, -2, 0])
    assert "layer is 1 and vectors 0; accepted: 0 of both" in refusal([29, 1, 2, 0])
    assert "layer is 0 and vectors 1; accepted: 0 of both" in refusal([29, 0, 2, 1])
    assert "its number of absent tokens is 0; accepted: 1 or more" in refusal([30, 0, 0, 0])
    assert "leaves out 2147483647 tokens; the vocabulary has 61" in refusal([30, 0, 2**31 - 1, 0])
    assert "leaves out 61 tokens; the vocabulary has 61" in refusal([30, 0, 61, 0])
    assert "accepted: 0, the adapter divides rotary positions" in refusal([29, 0, 2, 0], active_from=1)
    filled = weights.copy()
    filled[0, -1, 3] = 1
    assert "the padding after them must be zero" in refusal([29, 0, 2, 0], weights=filled)
    with pytest.raises(adaptrt.AdapterError, match="no row of config has weights"):
        executor.enqueue_request(make_request([3], 1, adaptrt.LoraConfig(71, weights[:, -1:], config[:, -1:])))
    twice = np.concatenate([config, config[:, -1:]], axis=1)
    with pytest.raises(adaptrt.AdapterError, match="repeats row"):
        executor.enqueue_request(
            make_request([3], 1, adaptrt.LoraConfig(72, np.concatenate([weights, weights[:, -1:]], axis=1), twice))
        )


def test_adapters_that_are_refused(llama: Served, tmp_path: Path) -> None:
    plain = engine_of(llama.model, tmp_path / "plain", build_config(()))
    assert "long_lora_scaling_factors" not in (plain / "config.json").read_text()
    assert b"rotary_factors" not in (plain / "rank0.engine").read_bytes()
    with pytest.raises(
        adaptrt.AdapterError, match=f"factor is 2 .the base has {POSITIONS} positions., and the engine's "
    ):
        adaptrt.LoraConfig.from_peft(1, llama.adapters["doubled"], plain)
    with (
        adaptrt.Executor(plain, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor,
        pytest.raises(adaptrt.AdapterError, match="by 2; the engine was built without such factors"),
    ):
        executor.enqueue_request(make_request([3], 1, llama.lora("doubled")))
    tripled = Path(shutil.copytree(llama.adapters["doubled"], tmp_path / "tripled"))
    for length, reason in (
        (
            3 * POSITIONS,
            r"factor is 3 \(the base has 40 positions\), and the engine's long_lora_scaling_factors are 2, 4",
        ),
        (-1, "context_length = -1: expected a number of tokens"),
        (2.5, "context_length = 2.5: expected a number of tokens"),
    ):
        edit_config(tripled, context_length=length)
        with pytest.raises(adaptrt.AdapterError, match=reason):
            adaptrt.LoraConfig.from_peft(1, tripled, llama.engine)
    with pytest.raises(adaptrt.AdapterError, match="depends on the base model; give the base model"):
        adaptrt.formats.adapter.convert_adapter(llama.adapters["longest"], storage_dtype="float32")
    with pytest.raises(adaptrt.AdapterError, match="longest' has a vocabulary of its own or divides rotary positions"):
        adaptrt.LoraConfig.from_peft(1, {llama.adapters["longest"]: 0.5, llama.adapters["plain"]: 0.5}, llama.engine)
    (tripled / "trainable_params.bin").write_bytes(b"")
    with pytest.raises(adaptrt.AdapterError, match="LongLoRA's trained embeddings and norms"):
        adaptrt.LoraConfig.from_peft(1, tripled, llama.engine)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "divide rotary positions, which GPT2LMHeadModel does not have"),
        ("gemma3", "Gemma3ForCausalLM has the bases 300, 5000"),
    ],
)
def test_families_that_engines_refuse_factors_of(family: str, reason: str, tmp_path: Path) -> None:
    known = FAMILIES[family]
    fields = dict(known.fields)
    if family == "gemma3":
        fields["rope_parameters"] = {"full_attention": rope(theta=5000.0), "sliding_attention": rope(theta=300.0)}
    model = save_family(dataclasses.replace(known, fields=fields), tmp_path / "model")
    with pytest.raises(adaptrt.ConfigError, match=reason):
        engine_of(model, tmp_path, build_config())


def test_configurations_that_are_refused(llama: Served, tmp_path: Path) -> None:
    convert_checkpoint(llama.model, tmp_path / "checkpoint")
    checkpoint = load_config(tmp_path / "checkpoint")

    def problems(config: BuildConfig, **fields: Any) -> str:
        changed = dataclasses.replace(checkpoint, **fields)
        return "; ".join(problems_of(config.with_defaults(changed), changed))

    scaling = LinearScaling(factor=2.0)
    assert problems(build_config()) == ""
    assert 'rotary_scaling is "linear"' in problems(build_config(), rotary_scaling=scaling)
    for factors in ((4, 2), (2, 2), (1,), (2000,)):
        assert "they must be ascending, and each of them 2 to 1024" in problems(build_config(factors))
    assert "max_seq_len 161 is above" in problems(build_config(max_seq_len=161))
    tensorrt = dataclasses.replace(build_config(), backend="tensorrt", tensorrt_config=TensorRtBuildConfig())
    assert "long_lora_scaling_factors need backend native" in problems(tensorrt)
    without = dataclasses.replace(build_config(), plugin_config=PluginConfig())
    assert "long_lora_scaling_factors needs lora_plugin" in problems(without)
    assert problems(build_config(), mapping=ParallelMapping(pp_size=2)) == ""

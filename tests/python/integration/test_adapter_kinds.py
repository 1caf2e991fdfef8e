"""Every supported kind of adapter against transformers + PEFT in float32, all kinds in one batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import peft
import pytest
import torch

import adaptrt
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import FAMILIES, LLAMA, save_family
from support.kinds import as_mlx, configs, save_kind, save_with_initial
from support.models import ModelSpec, Reference, load_model, save_model
from support.served_kinds import FLOAT32_TOLERANCE, ServedKinds, engine_of
from support.serving import Answer, collect, make_request

CONFIG = BuildConfig(
    max_batch_size=16,
    max_num_tokens=256,
    max_seq_len=128,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=64),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
# OLMoE's other layers are experts, which accept only LoRA.
ATTENTION_ALONE = dataclasses.replace(
    CONFIG,
    lora_config=LoraBuildConfig(max_lora_rank=64, lora_target_modules=("attn_q", "attn_k", "attn_v", "attn_dense")),
)


class Served(ServedKinds):
    """Adapters of each kind. Some are served with an initial adapter or in MLX-LM's format."""

    def __init__(self, name: str, directory: Path) -> None:
        if name == "llama":
            spec = ModelSpec(hidden_size=36, intermediate_size=40)
            model, targets = save_model(spec, directory / "model"), LLAMA
        else:
            model, targets = save_family(FAMILIES[name], directory / "model"), FAMILIES[name].targets
        engine = engine_of(model, directory, ATTENTION_ALONE if name == "olmoe" else CONFIG)
        super().__init__(model, engine, {}, new_tokens=8)
        self.name, self.targets, self.is_transposed = name, targets, name == "gpt2"
        kinds = configs(targets, self.is_transposed)
        # PEFT reads the adapters in by_peft; the engine serves those in adapters. Each pair must agree.
        self.by_peft = {
            kind: save_kind(self.model, directory / kind, config, seed)
            for seed, (kind, config) in enumerate(kinds.items())
        }
        self.adapters = dict(self.by_peft)
        for kind in ("lora", "dora"):
            self.by_peft[f"mlx-{kind}"] = self.by_peft[kind]
            self.adapters[f"mlx-{kind}"] = as_mlx(self.by_peft[kind], directory / f"mlx-{kind}", num_layers=-1)
        self.initial: dict[str, Path | None] = {}
        if name != "gpt2":
            for init in ("pissa", "olora"):
                adapter, initial = save_with_initial(
                    self.model, directory / init, init, 5, r=4, lora_alpha=6, target_modules=targets
                )
                self.by_peft[init] = self.adapters[init] = adapter
                self.initial[init] = initial
                self.by_peft[f"{init}-by-its-base"] = self.adapters[f"{init}-by-its-base"] = adapter
                self.initial[f"{init}-by-its-base"] = None

    def lora(self, kind: str) -> adaptrt.LoraConfig:
        task_id = list(self.adapters).index(kind)
        if kind not in self.initial:
            return adaptrt.LoraConfig.from_peft(task_id, self.adapters[kind], self.engine)
        converted = convert_adapter(
            self.adapters[kind], storage_dtype="float32", base=self.model, initial_adapter=self.initial[kind]
        )
        return adaptrt.LoraConfig(task_id, converted.weights, converted.config)


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2", "olmoe"])
def served(request, tmp_path_factory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def test_every_kind_in_one_batch_is_what_peft_computes(served: Served) -> None:
    served.check_against_peft()


def test_a_crowd_of_kinds_changes_no_bit(served: Served) -> None:
    served.check_crowd()


def test_kinds_come_back_after_eviction(served: Served) -> None:
    """Evicted adapters and sums give the same bits when requested again by name, and when they replace another
    adapter."""
    # The largest rank of the adapters, and a host cache that holds only some of them.
    rank, host_bytes = {"gpt2": (16, 120_000), "olmoe": (40, 150_000)}.get(served.name, (40, 300_000))
    cache = adaptrt.PeftCacheConfig(max_adapter_size=rank, optimal_adapter_size=rank, host_cache_size=host_bytes)
    prompt = list(range(5, 20))
    names = [*(kind for kind in served.adapters if kind not in served.initial), "lora:0.5+adalora:0.5"]
    with adaptrt.Executor(
        served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(peft_cache_config=cache)
    ) as executor:
        for name in names[:-1]:
            executor.add_adapter(name, served.adapters[name])

        def ask(name: str) -> Answer:
            return collect(executor, executor.enqueue_request(make_request(prompt, 4), adapter=name))

        first = {name: ask(name) for name in names}
        assert executor.lora_cache_stats().host_evictions > 0
        for name in reversed(names):
            assert ask(name).same_bits(first[name]), name
        executor.add_adapter("lora", served.adapters["mlx-dora"], replace=True)
        assert ask("lora").same_bits(first["dora"])
        for name in names[:-1]:
            executor.add_adapter("in turn", served.adapters[name], replace=True)
            assert ask("in turn").same_bits(first[name]), name


def test_factors_of_fused_layers(tmp_path: Path) -> None:
    """IA3 over Phi-3: the factors on down_proj's inputs apply to some of gate_up_proj's outputs, which have factors
    too."""
    model = save_family(FAMILIES["phi3"], tmp_path / "model")
    engine = engine_of(model, tmp_path, CONFIG)
    adapter = save_kind(model, tmp_path / "ia3", configs(FAMILIES["phi3"].targets, is_transposed=False)["ia3"], 3)
    prompt = list(range(2, 50))
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        lora = adaptrt.LoraConfig.from_peft(1, adapter, executor.engine)
        answer = collect(executor, executor.enqueue_request(make_request(prompt, 1, lora)))
    expected = Reference(model, adapter).logits(prompt).numpy()
    assert np.abs(answer.context_logits - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())


def test_a_weighted_sum_is_what_peft_adds(served: Served, tmp_path: Path) -> None:
    """PEFT's add_weighted_adapter() with "cat", in one batch with the single terms."""
    second = save_kind(served.model, tmp_path / "second", configs(served.targets, served.is_transposed)["lora"], 77)
    weights = {"first": 0.7, "second": -0.3}
    directories = {"first": served.adapters["lora"], "second": second}
    prompt = list(range(3, 40))
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        for name, directory in directories.items():
            executor.add_adapter(name, directory)
        names = ["first:0.7+second:-0.3", "first", "first:1e0", "second:-0.3+first:0.7"]
        ids = [executor.enqueue_request(make_request(prompt, 8), adapter=name) for name in names]
        answers = [collect(executor, request_id) for request_id in ids]
        by_path = {served.adapters["lora"]: 0.7, second: -0.3}
        again = adaptrt.LoraConfig.from_peft(5, by_path, served.engine)
        assert answers[0].same_bits(collect(executor, executor.enqueue_request(make_request(prompt, 8, again))))
    assert answers[1].same_bits(answers[2])
    np.testing.assert_allclose(answers[0].context_logits, answers[3].context_logits, rtol=0, atol=1e-3)

    model = load_model(served.model, attn_implementation="eager", experts_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, directories["first"], adapter_name="first")
    model.load_adapter(directories["second"], adapter_name="second")
    model.add_weighted_adapter(list(weights), list(weights.values()), "sum", combination_type="cat")
    model.set_adapter("sum")
    with torch.no_grad():
        expected = model.eval()(torch.tensor([prompt + answers[0].tokens[:-1]])).logits[0].numpy()
    actual = np.concatenate([answers[0].context_logits, answers[0].generation_logits[1:]])
    scale = expected.max() - expected.min()
    assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * scale
    assert answers[0].tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()
    assert np.abs(answers[1].context_logits - answers[0].context_logits).max() > 0.01 * scale


def test_sums_that_are_refused(served: Served) -> None:
    prompt = [3, 4, 5]
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        for name in ("lora", "dora", "adalora"):
            executor.add_adapter(name, served.adapters[name])
        terms = "+".join(["lora:0.5"] * 13)
        for name, reason in (
            ("lora:0.7+dora:0.3", r"'dora' has factors \(DoRA or IA3\)"),
            (terms, r"the ranks are 5 of 'lora' \+ .*, above max_lora_rank 64"),
            ("lora:0.7+nobody:0.3", "no adapter named 'nobody'"),
            ("lora:0.7+adalora", r"no adapter named 'lora:0\.7\+adalora'"),
            ("lora:nan", "no adapter named 'lora:nan'"),
        ):
            with pytest.raises(adaptrt.AdapterError, match=reason):
                executor.enqueue_request(make_request(prompt, 2), adapter=name)
        before = executor.adapters.task_id("lora:0.5+adalora:0.5")
        assert executor.adapters.task_id("lora:0.5+adalora:0.5") == before
        executor.add_adapter("adalora", served.adapters["vera"], replace=True)
        # The earlier sum stays available under its own task_id.
        assert executor.adapters.task_id("lora:0.5+adalora:0.5") != before
        collect(executor, executor.enqueue_request(make_request(prompt, 2), adapter="lora:0.5+adalora:0.5"))
        with pytest.raises(adaptrt.AdapterError, match=r"the weight of '.*' is inf; expected a finite number"):
            adaptrt.LoraConfig.from_peft(1, {served.adapters["lora"]: float("inf")}, served.engine)

"""Checks of the native CUDA engine: served requests compared with the CPU engine and with transformers, equal bits in
every crowd, failures, and requests for seconds or minutes."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import transformers
from engine_models import BACKEND, TINY, Weights, start_engine
from machine import Machine
from results import Check
from session_checks import agreement

import adaptrt
from adaptrt import ConfigError, _core
from adaptrt._core import QuantAlgo
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.runtime.cuda_engine import CudaEngine
from adaptrt.runtime.engine import load_engine
from adaptrt.runtime.loaded_engine import LoadedEngine
from support.adapter_crowds import ADAPTERS, MAX_RANK, SMALL_CROWD, TOLERANCE, Asked, Model
from support.families import LATENT_TARGETS, Family, save_family
from support.kinds import save_kind
from support.models import ALL_MODULES, ModelSpec, Reference, save_adapter, save_model
from support.serving import Answer, collect, crowd_fields, make_request
from support.stand_in_engine import difference

_RELU: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 136, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "hidden_act": "relu",
}  # fmt: skip
SMALL = Model.of(
    ModelSpec(
        vocab_size=104,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=80,
        num_hidden_layers=2,
    ),
    max_batch_size=6,
    max_num_tokens=24,
    max_seq_len=96,
    tokens_per_block=16,
)
LARGE = Model.of(
    ModelSpec(
        vocab_size=1000,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1024,
        num_hidden_layers=4,
        max_position_embeddings=9216,
    ),
    max_batch_size=64,
    max_num_tokens=1024,
    max_seq_len=9000,
    tokens_per_block=64,
)
# Largest difference to the logits of transformers in float32, relative to their range. The engine rounds activations to
# its type after every operator, and transformers does not round the adapters.
_REFERENCE_TOLERANCE = {"float16": 0.008, "bfloat16": 0.06}
# The same beside the CPU engine with int8 keys and values. Values that differ by a rounding may become integers that
# differ by one, which is 1/127 of a head's largest element.
_INT8_KV_TOLERANCE = {"float16": 0.012, "bfloat16": 0.03}
_COMPARED = 0.5
# Sizes of published models' heads: states of 128 rows.
_LINEAR_ATTENTION: tuple[tuple[str, Any], ...] = (
    ("layer_types", ["linear_attention", "full_attention"]),
    ("linear_num_key_heads", 2),
    ("linear_num_value_heads", 4),
    ("linear_key_head_dim", 128),
    ("linear_value_head_dim", 128),
)
_SMALL_FAMILY: dict[str, Any] = {
    "vocab_size": 104, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
# Heads of the published models' sizes. Heads of 512 have a kernel of their own.
_GEMMA4 = Family(
    transformers.Gemma4TextConfig,
    ALL_MODULES,
    {
        **_SMALL_FAMILY, "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 104, "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
)  # fmt: skip
# Tokens use all experts: see _other_weights().
_DEEPSEEK = Family(
    transformers.DeepseekV3Config,
    ["q_a_proj", "q_b_proj", *LATENT_TARGETS],
    {
        **_SMALL_FAMILY, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 2,
        "topk_group": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
    },
)  # fmt: skip
_LOST = "cannot be used any more"
_WAIT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Requests of the checks."""

    model: Model
    crowds: Sequence[Sequence[Asked]]
    """Compared with the CPU engine."""
    measured: Sequence[Asked]
    """Their bits are compared alone and with `others`."""
    others: Sequence[Asked]
    referenced: Sequence[Asked]
    """Compared with transformers."""
    few_tokens: int
    """Room in the KV cache for so few tokens that sequences of `pressed` are preempted."""
    pressed: Sequence[Asked]


@dataclasses.dataclass(frozen=True)
class CudaServed(CudaEngine):
    """A loaded engine directory of the cuda backend, on this machine's device or the emulated one."""

    machine: Machine | None = None
    cuda_graphs: bool = True
    look_ahead: bool = True

    @classmethod
    def load(cls, directory: Path, machine: Machine) -> CudaServed:
        """Loads the directory."""
        loaded = load_engine(directory)
        assert isinstance(loaded, CudaEngine)
        fields = {field.name: getattr(loaded, field.name) for field in dataclasses.fields(loaded)}
        return cls(**fields, machine=machine)

    def start(self, config: adaptrt.ExecutorConfig, *, beside: _core.Engine | None = None) -> _core.Engine:
        """Makes an engine on a new device."""
        assert self.machine is not None
        return start_engine(
            self.machine,
            self.program,
            cuda_graphs=self.cuda_graphs,
            look_ahead=self.look_ahead,
            weight_memory=self.weight_memory,
        )


class Case:
    """A model of one type, its adapters, and its engines for both backends."""

    def __init__(
        self,
        machine: Machine,
        model: Model,
        dtype: str,
        directory: Path,
        quantization: QuantConfig | None = None,
        *,
        int8_kv: bool = False,
    ) -> None:
        """quantization: of the engines' weights; transformers' are never quantised. int8_kv: of keys and values."""
        self.model, self.dtype = model, dtype
        stored = (
            *(() if quantization is None else (quantization.quant_algo.name,)),
            *(("int8 KV",) if int8_kv else ()),
        )
        self.name = " ".join(
            ("engine", dtype, *stored, *(() if model.spec.family == "llama" else (model.spec.family,)))
        )
        self.saved = save_model(model.spec, directory / "model")
        self.adapters = [
            save_adapter(
                self.saved,
                directory / f"adapter-{number}",
                seed=number,
                **{**self._linear_targets(), **lora},
                **self._experts(lora),
            )
            for number, lora in enumerate(ADAPTERS)
        ]
        convert_checkpoint(
            self.saved,
            directory / "checkpoint",
            dtype=_core.dtype_from_name(dtype),
            quantization=quantization,
            int8_kv_cache=int8_kv,
        )
        build(directory / "checkpoint", model.sizes, directory / "native")
        build(directory / "checkpoint", dataclasses.replace(model.sizes, backend=BACKEND), directory / BACKEND)
        self.directory = directory / BACKEND
        self.native = load_engine(directory / "native")
        self.cuda = CudaServed.load(self.directory, machine)
        self.loras = [adaptrt.LoraConfig.from_peft(n, path, self.native) for n, path in enumerate(self.adapters)]

    def _linear_targets(self) -> dict[str, Any]:
        """Returns the targets of adapters that name none, in models with linear attention."""
        if self.model.spec.family != "qwen3.5":
            return {}
        return {"target_modules": [*ALL_MODULES, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]}

    def _experts(self, lora: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of an adapter that also changes experts, which PEFT does not do with DoRA."""
        if "num_local_experts" not in dict(self.model.spec.extra) or lora.get("use_dora"):
            return {}
        return {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}

    def config(self, *, room: int = len(ADAPTERS), **fields: Any) -> adaptrt.ExecutorConfig:
        """Returns a config whose device holds this number of adapters of the maximum rank."""
        pages = room * MAX_RANK * self.model.spec.num_hidden_layers * 7
        cache = adaptrt.PeftCacheConfig(
            num_device_module_layer=pages, max_adapter_size=MAX_RANK, optimal_adapter_size=4, num_copy_streams=2
        )
        fields = {
            "enable_chunked_context": True,
            "num_threads": min(8, os.cpu_count() or 1),
            "peft_cache_config": cache,
            **fields,
        }
        return adaptrt.ExecutorConfig(**fields)

    def request(self, asked: Asked, *, whole: bool = True, weights: bool = True) -> Any:
        """Returns a request. whole: with the logits of the prompt. weights: brings the adapter's weights along."""
        lora = None
        if asked.adapter is not None and weights:
            lora = self.loras[asked.adapter]
        elif asked.adapter is not None:
            lora = adaptrt.LoraConfig(asked.adapter)
        if whole:
            return make_request(asked.prompt, asked.max_tokens, lora)
        output = adaptrt.OutputConfig(
            return_log_probs=True, top_log_probs=4, return_generation_logits=True, exclude_input_from_output=True
        )
        return adaptrt.Request(asked.prompt, asked.max_tokens, output_config=output, lora_config=lora)

    def answers(
        self,
        engine: LoadedEngine,
        config: adaptrt.ExecutorConfig,
        groups: Sequence[Sequence[Asked]],
        *,
        whole: bool = True,
    ) -> tuple[list[Answer], list[Any]]:
        """Runs the groups one after the other. Returns the answers and the statistics of the steps."""
        with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
            answers = []
            for group in groups:
                ids = executor.enqueue_requests([self.request(asked, whole=whole) for asked in group])
                answers += [collect(executor, request_id) for request_id in ids]
            return answers, executor.get_latest_iteration_stats()


def engine_checks(machine: Machine, subset: bool, soak_seconds: float) -> Iterator[Check]:
    """Checks both types. A `subset` uses a small model and few requests, and no soak."""
    for dtype in TOLERANCE:
        with tempfile.TemporaryDirectory(prefix="adaptrt-") as name:
            plan = _small_plan() if subset else _large_plan()
            case = Case(machine, plan.model, dtype, Path(name))
            yield from _native_check(case, plan)
            yield from _reference_check(case, plan)
            if dtype == "bfloat16" or not subset:  # The types differ only in the instructions that round.
                yield from _bit_checks(case, plan)
            if dtype == "bfloat16":
                yield from _directory_check(machine, case, plan)
                if not subset:
                    yield from soak(case, soak_seconds)
        yield from _other_weights(machine, dtype)
        yield from _other_adapters(machine, dtype)
        yield from _sparse_mlps(machine, dtype)
        for family, name in ((_GEMMA4, "gemma4"), (_DEEPSEEK, "deepseek-v3")):
            yield from _other_family(machine, dtype, family, name)
    yield from memory_checks(machine)


def _other_weights(machine: Machine, dtype: str) -> Iterator[Check]:
    """Serves a small model with quantised weights, one with experts, one with int8 keys and values, and one with
    states. Their kernels have checks of large sizes, except for int8 keys and values."""
    plain = dataclasses.replace(SMALL.spec, intermediate_size=96)
    # Tokens use all experts: where two are nearly tied, rounding chooses other ones than on the CPU.
    experts = dataclasses.replace(plain, family="mixtral", extra=(("num_local_experts", 8), ("num_experts_per_tok", 8)))
    cases = (
        (plain, QuantConfig(quant_algo=QuantAlgo.W8A16), False),
        (plain, QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=16), False),
        (experts, None, False),
        (experts, QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=16), False),
        (plain, None, True),
        (dataclasses.replace(plain, family="qwen3.5", extra=_LINEAR_ATTENTION), None, False),
    )
    plan = _small_plan()
    for spec, quantization, int8_kv in cases:
        model = dataclasses.replace(SMALL, spec=spec)
        with tempfile.TemporaryDirectory(prefix="adaptrt-") as name:
            case = Case(machine, model, dtype, Path(name), quantization, int8_kv=int8_kv)
            together, _ = case.answers(case.cuda, case.config(), [plan.measured])
            expected, _ = case.answers(case.native, case.config(), [plan.measured])
            tolerance = (_INT8_KV_TOLERANCE if int8_kv else TOLERANCE)[dtype]
            yield agreement(f"{case.name}: logits and tokens as the CPU engine's", together, expected, tolerance)
            alone, _ = case.answers(case.cuda, case.config(), [[asked] for asked in plan.measured])
            yield _same(f"{case.name}: bits alone and together", alone, together)


def _other_family(machine: Machine, dtype: str, family: Family, name: str) -> Iterator[Check]:
    """Serves a small model of a family, with an adapter and without."""
    with tempfile.TemporaryDirectory(prefix="adaptrt-") as made:
        directory = Path(made)
        model = save_family(family, directory / "model")
        adapter = save_adapter(model, directory / "adapter", seed=1, r=4, target_modules=family.targets)
        convert_checkpoint(model, directory / "checkpoint", dtype=_core.dtype_from_name(dtype))
        config = BuildConfig(
            max_batch_size=4,
            max_num_tokens=24,
            max_seq_len=64,
            tokens_per_block=16,
            plugin_config=PluginConfig(lora_plugin="auto"),
            lora_config=LoraBuildConfig(max_lora_rank=4),
        )
        build(directory / "checkpoint", config, directory / "native")
        build(directory / "checkpoint", dataclasses.replace(config, backend=BACKEND), directory / BACKEND)
        native, cuda = load_engine(directory / "native"), CudaServed.load(directory / BACKEND, machine)
        lora = adaptrt.LoraConfig.from_peft(1, adapter, native)
        requests = [make_request(prompt, 4, of) for prompt, of in (([5, 6, 7, 8], lora), ([*range(11, 41)], None))]
        expected, together, alone = (
            _served(engine, groups)
            for engine, groups in ((native, [requests]), (cuda, [requests]), (cuda, [[one] for one in requests]))
        )
        tolerance = TOLERANCE[dtype]
        yield agreement(f"engine {dtype} {name}: logits and tokens as the CPU engine's", together, expected, tolerance)
        yield _same(f"engine {dtype} {name}: bits alone and together", alone, together)


def _sparse_mlps(machine: Machine, dtype: str) -> Iterator[Check]:
    """Serves a ReLU Llama, with an adapter and without, whose neurons are on the device or in host memory. Budgets go
    from the least that is accepted to nearly all weights."""
    family = Family(transformers.LlamaConfig, ALL_MODULES, _RELU)
    with tempfile.TemporaryDirectory(prefix="adaptrt-") as made:
        directory = Path(made)
        model = save_family(family, directory / "model")
        adapter = save_adapter(model, directory / "adapter", seed=1, r=4, target_modules=ALL_MODULES)
        convert_checkpoint(model, directory / "checkpoint", dtype=_core.dtype_from_name(dtype))
        config = BuildConfig(
            max_batch_size=12,
            max_num_tokens=24,
            max_seq_len=64,
            tokens_per_block=16,
            backend=BACKEND,
            plugin_config=PluginConfig(lora_plugin="auto"),
            lora_config=LoraBuildConfig(max_lora_rank=4),
        )
        build(directory / "checkpoint", config, directory / BACKEND)
        engine = CudaServed.load(directory / BACKEND, machine)
        lora = adaptrt.LoraConfig.from_peft(1, adapter, engine)
        requests = [make_request([*range(5, 5 + length)], 3, lora if length % 2 else None) for length in (3, 4, 30)]
        expected = _served(engine, [requests])
        try:
            engine.with_weight_memory(1).start(adaptrt.ExecutorConfig())
        except ConfigError as error:
            outside, layer = (int(number) for number in re.findall(r"(\d+) bytes", str(error)))
        else:
            yield Check(f"engine {dtype} relu: a weight_memory of one byte", False, "it was accepted")
            return
        for layers in (2, 3, 4, 4.5, 5):
            limited = engine.with_weight_memory(int(outside + layers * layer))
            name = f"engine {dtype} relu: bits with weights of {layers:g} of 6 layers on the device"
            yield _same(name, _served(limited, [requests]), expected)


def _other_adapters(machine: Machine, dtype: str) -> Iterator[Check]:
    """Serves a small GPT-2 with an adapter that adds tokens and one that trains the biases of norms."""
    sizes = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 64, "n_inner": 56}
    family = Family(transformers.GPT2Config, ["c_attn"], {**sizes, "bos_token_id": 0, "eos_token_id": 1})
    lora = {"task_type": "CAUSAL_LM", "target_modules": ["c_attn"], "r": 4, "fan_in_fan_out": True}
    kinds = {"new tokens": (peft.LoraConfig(**lora), 3), "norms": (peft.LoraConfig(**lora, bias="all"), 0)}
    with tempfile.TemporaryDirectory(prefix="adaptrt-") as name:
        directory = Path(name)
        model = save_family(family, directory / "model")
        adapters = [
            save_kind(model, directory / kind, config, seed, extra)
            for seed, (kind, (config, extra)) in enumerate(kinds.items())
        ]
        convert_checkpoint(model, directory / "checkpoint", dtype=_core.dtype_from_name(dtype))
        config = BuildConfig(
            max_batch_size=4,
            max_num_tokens=24,
            max_seq_len=64,
            tokens_per_block=16,
            plugin_config=PluginConfig(lora_plugin="auto"),
            lora_config=LoraBuildConfig(max_lora_rank=4, max_extra_tokens=5),
        )
        build(directory / "checkpoint", config, directory / "native")
        build(directory / "checkpoint", dataclasses.replace(config, backend=BACKEND), directory / BACKEND)
        native, cuda = load_engine(directory / "native"), CudaServed.load(directory / BACKEND, machine)
        loras = [adaptrt.LoraConfig.from_peft(number, path, native) for number, path in enumerate(adapters)]
        requests = [
            make_request(prompt, 6, adapter)
            for prompt, adapter in (
                ([5, 97, 6, 98, 99, 7], loras[0]), ([8, 9, 10], loras[1]), ([*range(11, 41)], None),
            )
        ]  # fmt: skip

        together = _served(cuda, [requests])
        subject = f"engine {dtype} with new tokens and biases of norms"
        expected = _served(native, [requests])
        yield agreement(f"{subject}: logits and tokens as the CPU engine's", together, expected, TOLERANCE[dtype])
        alone = _served(cuda, [[request] for request in requests])
        yield _same(f"{subject}: bits alone and together", alone, together)


def _served(engine: LoadedEngine, groups: Sequence[Sequence[Any]]) -> list[Answer]:
    """Serves the groups one after the other."""
    config = adaptrt.ExecutorConfig(enable_chunked_context=True, num_threads=1)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        return [collect(executor, request_id) for group in groups for request_id in executor.enqueue_requests(group)]


def soak_checks(machine: Machine, subset: bool, seconds: float) -> Iterator[Check]:
    """Serves requests for some time, with cancels and replaced adapters."""
    with tempfile.TemporaryDirectory(prefix="adaptrt-") as name:
        yield from soak(Case(machine, SMALL if subset else LARGE, "bfloat16", Path(name)), seconds)


def lost_engine_checks(machine: Machine) -> Iterator[Check]:
    """Checks that a lost device ends a running engine's request and its executor with the reason. Afterwards this
    process cannot use CUDA."""
    program = Weights(machine, TINY).program(max_batch_size=4, max_num_tokens=64, max_seq_len=96, tokens_per_block=16)
    executor = _core.Executor(start_engine(machine, program), adaptrt.ExecutorConfig(), 1 << 30)
    request = adaptrt.Request([5, 6, 7], 3)
    executor.await_responses(executor.enqueue_request(request))
    kernel = machine.kernels.LoraKernel(adaptrt.DType.FLOAT16.value, 0, [1], [8], 8, False)
    nowhere = 16
    kernel.enqueue(1, 8, 1, 1, [nowhere] * 6, [nowhere], nowhere, 0)
    response = executor.await_responses(executor.enqueue_request(request))[-1]
    yield Check("engine: the device's loss ends the request", _LOST in (response.error_msg or ""), response.error_msg)
    try:
        executor.await_responses(executor.enqueue_request(request))
        yield Check("engine: the device's loss ends the executor", False, "it still accepts requests")
    except adaptrt.ExecutorClosedError as error:
        yield Check("engine: the device's loss ends the executor", _LOST in str(error), str(error))


def _native_check(case: Case, plan: Plan) -> Iterator[Check]:
    config = case.config(room=2)
    expected, _ = case.answers(case.native, config, plan.crowds)
    actual, stats = case.answers(case.cuda, config, plan.crowds)
    name = f"{case.name}: logits and tokens of {len(actual)} requests as the CPU engine's"
    yield agreement(name, actual, expected, TOLERANCE[case.dtype])
    evictions = stats[-1].lora_cache_stats.device_evictions
    yield Check(f"{case.name}: adapters were evicted", evictions > 0, f"{evictions} evictions")
    roomy, _ = case.answers(case.cuda, case.config(), plan.crowds)
    yield _same(f"{case.name}: bits after evictions", roomy, actual)
    direct, _ = case.answers(dataclasses.replace(case.cuda, cuda_graphs=False), case.config(), plan.crowds)
    yield _same(f"{case.name}: bits without graphs", roomy, direct)


def _reference_check(case: Case, plan: Plan) -> Iterator[Check]:
    """Compares logits with transformers for the engine's own tokens, and its tokens where they are no ties."""
    answers, _ = case.answers(case.cuda, case.config(), [plan.referenced])
    tolerance, worst, different, compared = _REFERENCE_TOLERANCE[case.dtype], 0.0, [], 0
    for asked, answer in zip(plan.referenced, answers, strict=True):
        adapter = None if asked.adapter is None else case.adapters[asked.adapter]
        expected = Reference(case.saved, adapter).logits(asked.prompt, answer.tokens).numpy()
        length = len(asked.prompt)
        worst = max(worst, difference(answer.context_logits, expected[:length]))
        generated = expected[length - 1 :]
        worst = max(worst, difference(answer.generation_logits[: len(generated)], generated))
        for logits, token in zip(generated, answer.tokens, strict=False):
            compared += 1
            gap = float(logits.max() - logits[token])
            if gap > 2 * tolerance * float(logits.max() - logits.min()):
                different.append((asked.adapter, token, gap))
    detail = f"logits within {worst:.2g} of their range, {compared} tokens"
    passed = worst <= tolerance and not different and compared > 0
    yield Check(
        f"{case.name}: logits and tokens as transformers' in float32", passed,
        detail + (f", others: {different}" if different else ""),
    )  # fmt: skip


def _bit_checks(case: Case, plan: Plan) -> Iterator[Check]:
    name = f"{case.name}: bits of {len(plan.measured)} requests"
    alone, _ = case.answers(case.cuda, case.config(), [[asked] for asked in plan.measured])
    crowd = [*plan.others[: len(plan.others) // 2], *plan.measured, *plan.others[len(plan.others) // 2 :]]
    together, _ = case.answers(case.cuda, case.config(), [crowd])
    first = len(plan.others) // 2
    yield _same(f"{name} alone and among {len(crowd)}", alone, together[first : first + len(plan.measured)])
    roomy, _ = case.answers(case.cuda, case.config(), [plan.pressed])
    fields = crowd_fields("MAX_UTILIZATION", plan.few_tokens, reuse=False)
    pressed, stats = case.answers(case.cuda, case.config(**fields), [plan.pressed])
    paused = max(step.inflight_batching_stats.num_paused_requests for step in stats)
    yield Check(f"{case.name}: requests were preempted", paused > 0, f"at most {paused} at a time")
    yield _same(f"{case.name}: bits after preemption", roomy, pressed)
    yield from _reuse_checks(case, plan)
    yield from _streaming_checks(case, plan)
    yield _selection_check(case, plan)
    yield from _look_ahead_checks(case, plan)
    # The last chunk has one token, or two: in the other step, a token of another request is computed too.
    long = case.model.ask((case.model.sizes.max_num_tokens + 1, None, 4), seed=31)
    whole, _ = case.answers(case.cuda, case.config(), [long])
    chunked, _ = case.answers(case.cuda, case.config(), [[*case.model.ask((1, None, 2), seed=32), *long]])
    yield _same(f"{case.name}: bits of a prompt whose last chunk has one token", whole, chunked[1:])


def _look_ahead_checks(case: Case, plan: Plan) -> Iterator[Check]:
    """Checks steps that the device begins before the host has the tokens of the step before.

    Every third request ends with a token that it generates half way, so rows are computed in vain.
    """
    waiting = dataclasses.replace(case.cuda, look_ahead=False)
    whole, _ = _greedy(case, waiting, plan.measured, [None] * len(plan.measured))
    ends = [answer.tokens[len(answer.tokens) // 2] if number % 3 == 0 else None for number, answer in enumerate(whole)]
    expected, none = _greedy(case, waiting, plan.measured, ends)
    found, steps = _greedy(case, case.cuda, plan.measured, ends)
    same = all(one.same_log_probs(other) for one, other in zip(expected, found, strict=True))
    yield Check(f"{case.name}: tokens and log probs of steps begun ahead", same, f"{len(found)} requests")
    num_ahead, num_none = (sum(step.begun_ahead for step in each) for each in (steps, none))
    # A row in vain would advance states, so steps of models with states wait.
    looks_ahead = steps[-1].state_stats is None
    yield Check(
        f"{case.name}: steps are begun ahead, or wait", num_none == 0 and (num_ahead > 0) == looks_ahead,
        f"{num_ahead} of {len(steps)} steps",
    )  # fmt: skip


def _greedy(
    case: Case, engine: LoadedEngine, asked: Sequence[Asked], end_ids: Sequence[int | None]
) -> tuple[list[Answer], list[Any]]:
    """Runs greedy requests that return log probs of their tokens. Returns the answers and the statistics of steps."""
    output = adaptrt.OutputConfig(return_log_probs=True, top_log_probs=2, exclude_input_from_output=True)
    requests = [
        adaptrt.Request(
            each.prompt,
            each.max_tokens,
            end_id=end_id,
            output_config=output,
            lora_config=None if each.adapter is None else case.loras[each.adapter],
        )
        for each, end_id in zip(asked, end_ids, strict=True)
    ]
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, case.config()) as executor:
        answers = [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]
        return answers, executor.get_latest_iteration_stats()


def _streaming_checks(case: Case, plan: Plan) -> Iterator[Check]:
    """Checks layers that are copied to the device ahead of use."""
    if case.model.spec.num_hidden_layers <= 2:  # they all fit where two of them fit
        return
    expected, _ = case.answers(case.cuda, case.config(), [plan.measured])
    try:
        case.answers(case.cuda, case.config(weight_memory=1), [])
    except ConfigError as error:
        least = int(str(error).split("expected at least ")[1].split(":")[0])
    else:
        yield Check(f"{case.name}: a weight_memory of one byte", False, "it was accepted")
        return
    limited, _ = case.answers(case.cuda, case.config(weight_memory=least), [plan.measured])
    yield _same(f"{case.name}: bits with layers copied ahead of use", expected, limited)


def _selection_check(case: Case, plan: Plan) -> Check:
    """Checks that tokens and log probs from highest logits are those from whole rows."""
    sampling = [{}, {"top_k": 50, "temperature": 1.5}, {"top_k": 128, "top_p": 0.9, "temperature": 2.0}]
    found = []
    with adaptrt.Executor(case.cuda, adaptrt.ModelType.DECODER_ONLY, case.config()) as executor:
        for with_logits in (True, False):
            ids = [
                executor.enqueue_request(
                    make_request(
                        asked.prompt,
                        asked.max_tokens,
                        with_logits=with_logits,
                        sampling_config=adaptrt.SamplingConfig(**sampling[number % len(sampling)], seed=number),
                    )
                )
                for number, asked in enumerate(plan.measured)
            ]
            found.append([collect(executor, request_id) for request_id in ids])
    different = [n for n, (row, other) in enumerate(zip(*found, strict=True)) if not row.same_log_probs(other)]
    return Check(f"{case.name}: tokens from highest logits", not different, f"different: {different}")


def _reuse_checks(case: Case, plan: Plan) -> Iterator[Check]:
    """Asks each request twice: the second time, the blocks of its prompt are cached."""
    once = [[asked] for asked in plan.pressed]
    twice = [group for group in once for _ in range(2)]
    none = adaptrt.KvCacheConfig(enable_block_reuse=False)
    expected, _ = case.answers(case.cuda, case.config(kv_cache_config=none), once, whole=False)
    for name, partial in (("whole blocks", False), ("parts of blocks", True)):
        cache = adaptrt.KvCacheConfig(enable_block_reuse=True, enable_partial_reuse=partial)
        found, stats = case.answers(case.cuda, case.config(kv_cache_config=cache), twice, whole=False)
        kv = stats[-1].kv_cache_stats
        reused = kv.partially_reused_blocks if partial else kv.reused_blocks
        yield Check(f"{case.name}: {name} were reused", reused > 0, f"{reused} blocks")
        yield _same(f"{case.name}: bits with {name} reused", [one for one in expected for _ in "12"], found)


def _directory_check(machine: Machine, case: Case, plan: Plan) -> Iterator[Check]:
    """Checks that Executor serves the directory itself, which needs adaptrt._cuda."""
    if not machine.is_gpu:
        return
    asked = plan.referenced[0]
    expected, _ = case.answers(case.cuda, case.config(), [[asked]])
    with adaptrt.Executor(case.directory, adaptrt.ModelType.DECODER_ONLY, case.config()) as executor:
        answer = collect(executor, executor.enqueue_request(case.request(asked)))
    yield _same("engine: bits of an executor of the directory", expected, [answer])


def soak(case: Case, seconds: float) -> Iterator[Check]:
    """Keeps requests running for `seconds`, cancels some, and replaces adapters. Some requests are asked again and
    again, and must always get the same tokens."""
    rng = random.Random(17)
    vocab, most = case.model.spec.vocab_size, case.model.sizes.max_seq_len or 96
    names = [None, *range(len(ADAPTERS))]
    lengths = [min(most - 14, length) for length in (1, 5, 17, 60, 130, 700)]
    # Tasks whose weights are never replaced.
    repeated = [
        Asked([rng.randrange(2, vocab) for _ in range(length)], name, 10)
        for length, name in zip(lengths, names, strict=False)
    ]
    swapped = 100
    config = case.config(room=2, kv_cache_config=adaptrt.KvCacheConfig(max_tokens=64 * most // 8))
    wrong, errors = [], []
    counts = {"requests": 0, "cancelled": 0, "replaced": 0, "compared": 0}
    with adaptrt.Executor(case.cuda, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        for one in case.loras:
            executor.put_adapter(one)
        expected = [
            _tokens(executor, executor.enqueue_request(case.request(asked, whole=False, weights=False)), errors)
            for asked in repeated
        ]
        running: dict[int, int | None] = {}
        end = time.monotonic() + seconds
        while running or time.monotonic() < end:
            while len(running) < case.model.sizes.max_batch_size + 8 and time.monotonic() < end:
                number = rng.randrange(len(repeated)) if rng.random() < 0.3 else None
                if number is not None:
                    request = case.request(repeated[number], whole=False, weights=False)
                else:
                    if rng.random() < 0.1:
                        other = rng.choice(case.loras)
                        executor.put_adapter(adaptrt.LoraConfig(swapped, other.weights, other.config, replace=True))
                        counts["replaced"] += 1
                    name = rng.choice([*names, swapped] if counts["replaced"] else names)
                    prompt = [rng.randrange(2, vocab) for _ in range(rng.choice(lengths))]
                    request = case.request(Asked(prompt, name, rng.randint(1, 12)), whole=False, weights=False)
                running[executor.enqueue_request(request)] = number
                counts["requests"] += 1
            for request_id in [one for one, number in running.items() if number is None and rng.random() < 0.02]:
                executor.cancel_request(request_id)
                counts["cancelled"] += 1
            request_id, number = next(iter(running.items()))
            del running[request_id]
            tokens = _tokens(executor, request_id, errors)
            if number is not None:
                counts["compared"] += 1
                if tokens != expected[number]:
                    wrong.append(number)
        steps = executor.get_latest_iteration_stats()[-1].iter
    detail = ", ".join(f"{count} {name}" for name, count in counts.items()) + f", {steps} steps"
    passed = not wrong and not errors and counts["compared"] > 0 and counts["cancelled"] > 0
    detail += f", others: {wrong[:9]}" if wrong else ""
    detail += f", errors: {errors[:3]}" if errors else ""
    yield Check(f"engine: {seconds:.0f} s with cancels and replaced adapters", passed, detail)


def memory_checks(machine: Machine) -> Iterator[Check]:
    """Checks that too little memory is refused with the reason, and that the device works afterwards."""
    program = Weights(machine, TINY).program(max_batch_size=4, max_num_tokens=64, max_seq_len=96, tokens_per_block=16)
    if machine.is_gpu:
        device = machine.kernels.CudaDevice()
        held = _fill(device)
    else:
        device, held = machine.kernels.CudaDevice(total_bytes=1 << 16), []
    try:
        start_engine(machine, program, device=device)
        yield Check("engine: weights beyond the device's memory are refused", False, "no error")
    except ConfigError as error:
        yield Check("engine: weights beyond the device's memory are refused", True, str(error))
    held.clear()
    engine = start_engine(machine, program, device=device if machine.is_gpu else None)
    try:
        engine.allocate_kv_blocks((1 << 31) - 1)
        yield Check("engine: a KV pool beyond the device's memory is refused", False, "no error")
    except ConfigError as error:
        yield Check("engine: a KV pool beyond the device's memory is refused", True, str(error))
    engine = start_engine(machine, program, device=device if machine.is_gpu else None)
    with _core.Executor(engine, adaptrt.ExecutorConfig(), 1 << 30) as executor:
        response = executor.await_responses(executor.enqueue_request(adaptrt.Request([5, 6, 7], 3)))[-1]
        yield Check("engine: the device works after that", not response.has_error(), str(response.error_msg))


def _fill(device: Any) -> list[Any]:
    """Allocates nearly all of a device's memory."""
    held, size = [], device.memory().free_bytes
    while size >= 1 << 12:
        try:
            held.append(device.allocate(size))
        except ConfigError:
            size //= 2
    return held


def _tokens(executor: adaptrt.Executor, request_id: int, errors: list[str]) -> list[int]:
    response = executor.await_responses(request_id, _WAIT_SECONDS)
    if not response:
        errors.append(f"request {request_id} had no answer for {_WAIT_SECONDS:.0f} s")
        return []
    if response[-1].has_error():
        errors.append(str(response[-1].error_msg))
        return []
    return list(response[-1].result.output_token_ids[0])


def _same(name: str, some: Sequence[Answer], others: Sequence[Answer]) -> Check:
    different = [n for n, (one, other) in enumerate(zip(some, others, strict=True)) if not one.same_bits(other)]
    return Check(name, not different, f"{len(some)} requests, different: {different}")


def _small_plan() -> Plan:
    crowd = SMALL.ask((33, None, 4), (5, 3, 6), (1, 1, 5), (26, 2, 5), (17, 4, 3))
    return Plan(
        SMALL,
        SMALL_CROWD[:1],
        SMALL.ask((30, None, 3), (5, 1, 4), (40, 2, 3), seed=3),
        crowd,
        SMALL.ask((20, None, 4), (9, 1, 4), (12, 2, 4), seed=4),
        80,
        SMALL.ask((20, None, 20), (26, 1, 20), (30, 2, 15), (18, 3, 20), seed=5),
    )


def _large_plan() -> Plan:
    rng = random.Random(23)
    names = [None, *range(len(ADAPTERS))]
    mixed = [(rng.choice((1, 2, rng.randint(3, 60), rng.randint(60, 500))), rng.choice(names), rng.randint(1, 12))
             for _ in range(60)]  # fmt: skip
    lengths = (1, 7, 65, 300, 1500, 4000, 8000)
    measured = [(length, names[i % len(names)], 24) for i, length in enumerate(lengths)]
    others = [(rng.choice((1, 30, rng.randint(60, 1500))), rng.choice(names), rng.randint(8, 40)) for _ in range(57)]
    return Plan(
        LARGE,
        (LARGE.ask(*mixed, seed=21), LARGE.ask((90, 1, 30), seed=22)),
        LARGE.ask(*measured, seed=23),
        LARGE.ask(*others, seed=24),
        LARGE.ask((40, None, 8), (150, 1, 8), (70, 2, 8), (100, 4, 8), seed=25),
        1024,
        LARGE.ask(*((150 + 20 * i, names[i % len(names)], 60) for i in range(10)), seed=26),
    )

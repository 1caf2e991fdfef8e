"""Checks of the kernels of mixtures of experts: against float64, and single tokens against batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from machine import KERNEL_DTYPES, Machine
from results import Check

from adaptrt._core import RouterScores

DTYPES = (torch.float16, torch.bfloat16)
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Tensor cores may truncate where float32 addition would round.
_SUM_ROUNDING = 2.0**-20
_SMALLEST = 2.0**-24


def expert_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Runs all checks, or a `subset` small enough for compute-sanitizer and the emulation."""
    generator = torch.Generator(machine.device)
    seed = generator.seed()
    sizes = ((8, 2, 72, 40),) if subset else ((8, 2, 4096, 1024), (128, 8, 2048, 768), (32, 4, 2880, 2880))
    for experts, top_k, hidden, inner in sizes:
        for scores in RouterScores:
            yield _routing(machine, generator, seed, scores, experts, top_k)
        for dtype in DTYPES:
            layer = _Layer(machine, generator, dtype, experts, top_k, hidden, inner)
            for tokens in (1, 20) if subset else (1, 7, 64, 1000, 4096):
                yield from _layer_checks(layer, tokens, seed)


def _routing(
    machine: Machine, generator: torch.Generator, seed: int, scores: RouterScores, experts: int, top_k: int
) -> Check:
    logits = torch.randn((100, experts), device=machine.device, generator=generator)
    chosen, weights = _route(machine, logits, scores, top_k)
    rated = logits.double()
    if scores != RouterScores.SOFTMAX_OF_CHOSEN:
        rated = rated.softmax(-1) if scores == RouterScores.SOFTMAX else rated.sigmoid()
    expected = rated.topk(top_k).indices.sort().values
    of_chosen = rated.gather(1, expected)
    if scores == RouterScores.SOFTMAX_OF_CHOSEN:
        of_chosen = of_chosen.softmax(-1)
    of_chosen = of_chosen / of_chosen.sum(-1, keepdim=True)
    wrong = int((chosen != expected).sum()) + int(((weights - of_chosen).abs() > 1e-5).sum())
    return Check(f"experts route {scores.name} {top_k} of {experts}", wrong == 0, f"{wrong} wrong with seed {seed}")


def _route(
    machine: Machine, logits: torch.Tensor, scores: RouterScores, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    chosen = torch.full((tokens, top_k), -1, dtype=torch.int32, device=machine.device)
    weights = machine.poisoned((tokens, top_k), torch.float32)
    machine.kernels.enqueue_route(
        tokens=tokens,
        experts=experts,
        scores=scores.value,
        top_k=top_k,
        norm_topk_prob=True,
        logits=logits.data_ptr(),
        chosen=chosen.data_ptr(),
        weights=weights.data_ptr(),
        stream=machine.stream(),
    )
    machine.synchronize()
    return chosen, weights


@dataclass
class _Layer:
    """Two products of random experts, without an activation between them."""

    machine: Machine
    generator: torch.Generator
    dtype: torch.dtype
    experts: int
    top_k: int
    hidden: int
    inner: int

    def __post_init__(self) -> None:
        self.up = self.random(self.experts, self.inner, self.hidden).to(self.dtype)
        self.down = self.random(self.experts, self.hidden, self.inner).to(self.dtype)
        self.bias = self.random(self.experts, self.hidden)

    def random(self, *shape: int) -> torch.Tensor:
        """Returns normally distributed float32 values."""
        return torch.randn(shape, device=self.machine.device, generator=self.generator)

    def run(self, x: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns chosen experts, weights, the inner values by token and place, and the output."""
        machine, dtype = self.machine, KERNEL_DTYPES[self.dtype].value
        tokens = len(x)
        slots = tokens * self.top_k
        chosen, weights = _route(machine, logits, RouterScores.SOFTMAX, self.top_k)
        offsets, entries, slots_of, expert_of = (
            torch.full((size,), -1, dtype=torch.int32, device=machine.device)
            for size in (self.experts + 1, slots, slots, slots)
        )
        machine.kernels.enqueue_number_slots(
            slots=slots,
            experts=self.experts,
            chosen=chosen.data_ptr(),
            offsets=offsets.data_ptr(),
            entries=entries.data_ptr(),
            slots_of=slots_of.data_ptr(),
            expert_of=expert_of.data_ptr(),
            stream=machine.stream(),
        )
        inner = machine.poisoned((slots, self.inner), self.dtype)
        made = machine.poisoned((slots, self.hidden), self.dtype)
        for source, weight, gathered, y in ((x, self.up, entries.data_ptr(), inner), (inner, self.down, 0, made)):
            machine.kernels.enqueue_expert_product(
                dtype=dtype,
                slots=slots,
                experts=self.experts,
                in_size=source.shape[1],
                out_size=y.shape[1],
                offsets=offsets.data_ptr(),
                entries=gathered,
                entries_per_row=self.top_k,
                x=source.data_ptr(),
                weights=weight.data_ptr(),
                y=y.data_ptr(),
                stream=machine.stream(),
            )
        output = machine.poisoned((tokens, self.hidden), torch.float32)
        machine.kernels.enqueue_sum_slots(
            dtype=dtype,
            tokens=tokens,
            top_k=self.top_k,
            width=self.hidden,
            slots_of=slots_of.data_ptr(),
            weights=weights.data_ptr(),
            y=made.data_ptr(),
            bias=self.bias.data_ptr(),
            chosen=chosen.data_ptr(),
            adds=False,
            output=output.data_ptr(),
            stream=machine.stream(),
        )
        machine.synchronize()
        places = slots_of.long()
        return chosen, weights, inner[places].view(tokens, self.top_k, -1), output


def _layer_checks(layer: _Layer, tokens: int, seed: int) -> Iterator[Check]:
    x, logits = layer.random(tokens, layer.hidden).to(layer.dtype), layer.random(tokens, layer.experts)
    chosen, weights, inner, output = layer.run(x, logits)
    rounding = _ROUNDING[layer.dtype]
    wrong = 0
    # Some tokens are enough: experts' matrices in float64 are large.
    for token in torch.randperm(tokens)[:5].tolist():
        experts = chosen[token].long()
        up, down = layer.up[experts].double(), layer.down[experts].double()
        own = x[token].double()
        expected = up @ own
        terms = up.abs() @ own.abs()
        bound = expected.abs() * rounding + terms * _SUM_ROUNDING + _SMALLEST
        wrong += int((~((inner[token].double() - expected).abs() <= bound)).sum())
        rows = inner[token].double()[..., None]
        share, bias = weights[token].double()[:, None], layer.bias[experts].double()
        result = (((down @ rows)[..., 0] + bias) * share).sum(0)
        terms = (((down.abs() @ rows.abs())[..., 0] + bias.abs()) * share).sum(0)
        bound = terms * (rounding + _SUM_ROUNDING) + _SMALLEST
        wrong += int((~((output[token].double() - result).abs() <= bound)).sum())
    dtype = str(layer.dtype).removeprefix("torch.")
    name = f"experts {dtype} {layer.top_k} of {layer.experts}, {layer.hidden} to {layer.inner}, tokens {tokens}"
    yield Check(name, wrong == 0, f"{wrong} wrong elements with seed {seed}")
    place = int(torch.randint(tokens, (1,)))
    alone = layer.run(x[place : place + 1].clone(), logits[place : place + 1].clone())[-1]
    same = torch.equal(alone[0].view(torch.int32), output[place].view(torch.int32))
    yield Check(f"{name}: bits alone and together", same, f"they differ with seed {seed}")

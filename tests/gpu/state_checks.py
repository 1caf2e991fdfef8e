"""Checks of the kernels that advance states, and of their gates: against float64, and sequences alone and together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from machine import KERNEL_DTYPES, Machine
from results import Check

from adaptrt._core import DeltaShape, ScanShape

_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}
# Errors of float32 sums over many tokens, relative to the largest value.
_TOLERANCE = 3e-5
_EPSILON = 1e-6
_TIMES = (0.4, 2.5)
_UPDATE_SCALE = 1.5

Run = Callable[["_Sequences", slice], torch.Tensor]
"""Runs an op on some rows, the tokens of the sequences. Returns its outputs."""
Next = Callable[[int, torch.Tensor], torch.Tensor]
"""Advances a state by a row, in float64. Returns the row's outputs."""


def state_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Runs all checks, or a `subset` small enough for compute-sanitizer and the emulation."""
    generator = torch.Generator(machine.device)
    states = _States(machine, generator, generator.seed(), (3, 1, 7) if subset else (61, 1, 200))
    for width, taps in ((130, 4),) if subset else ((130, 2), (6144, 4), (12288, 3)):
        yield from states.convolution(width, taps)
        for dtype in KERNEL_DTYPES:
            yield from states.gated_convolution(dtype, width, taps)
    for delta in ((1, 2, 10, 12),) if subset else ((2, 4, 10, 12), (4, 8, 128, 128), (2, 2, 256, 72)):
        yield from states.gated_delta(*delta)
    for scan in ((2, 16, 1, 10),) if subset else ((8, 16, 2, 10), (24, 64, 1, 128), (16, 64, 8, 256)):
        yield from states.selective_scan(*scan)
    for dtype in KERNEL_DTYPES:
        for rows, width, group in ((3, 144, 72),) if subset else ((3, 144, 72), (500, 4096, 128), (7, 8192, 8192)):
            yield from states.gated_norm(dtype, rows, width, group)
            yield states.sigmoid_gate(dtype, rows, width)


@dataclass(frozen=True)
class _Sequences:
    """Sequences of a run, and states in slots; the slots of sequences are in reverse order."""

    offsets: torch.Tensor
    slots: torch.Tensor
    states: torch.Tensor
    """[slots, state]"""

    @property
    def argument(self) -> tuple[int, int, int, int, int]:
        """The kernels' argument."""
        addresses = (self.offsets.data_ptr(), self.slots.data_ptr(), self.states.data_ptr())
        return (len(self.slots), *addresses, self.states.shape[1])


@dataclass(frozen=True)
class _States:
    machine: Machine
    generator: torch.Generator
    seed: int
    lengths: tuple[int, ...]

    def convolution(self, width: int, taps: int) -> Iterator[Check]:
        """Checks a convolution in place, in rows that have more columns."""
        stride = width + 6
        values, weight, bias = self._random(self._rows, stride), self._random(taps, width), self._random(width)

        def run(sequences: _Sequences, rows: slice) -> torch.Tensor:
            copy = values[rows].clone()
            self.machine.kernels.enqueue_causal_convolution(
                states=sequences.argument,
                width=width,
                stride=stride,
                taps=taps,
                weight=weight.data_ptr(),
                bias=bias.data_ptr(),
                values=copy.data_ptr(),
                stream=self.machine.stream(),
            )
            self.machine.synchronize()
            return copy[:, :width]

        def advance(row: int, state: torch.Tensor) -> torch.Tensor:
            found = _convolved(values[row, :width].double(), weight, bias, state.view(taps - 1, width))
            return found * found.sigmoid()

        yield from self._checks(f"convolution {taps} taps x {width}", run, advance, (taps - 1) * width)

    def gated_convolution(self, dtype: torch.dtype, width: int, taps: int) -> Iterator[Check]:
        """Checks a convolution between two gates."""
        values, weight, bias = self._random(self._rows, 3 * width), self._random(taps, width), self._random(width)

        def run(sequences: _Sequences, rows: slice) -> torch.Tensor:
            given = values[rows].clone()
            output = self.machine.poisoned((len(given), width), dtype)
            self.machine.kernels.enqueue_gated_convolution(
                dtype=KERNEL_DTYPES[dtype].value,
                states=sequences.argument,
                width=width,
                taps=taps,
                weight=weight.data_ptr(),
                bias=bias.data_ptr(),
                input=given.data_ptr(),
                output=output.data_ptr(),
                stream=self.machine.stream(),
            )
            self.machine.synchronize()
            return output

        def advance(row: int, state: torch.Tensor) -> torch.Tensor:
            b, c, x = values[row].double().split(width)
            return c * _convolved(b * x, weight, bias, state.view(taps - 1, width))

        name = f"gated convolution {_name(dtype)} {taps} taps x {width}"
        yield from self._checks(name, run, advance, (taps - 1) * width)

    def gated_delta(self, key_heads: int, heads: int, key_dim: int, value_dim: int) -> Iterator[Check]:
        """Checks the gated delta rule."""
        shape = DeltaShape(num_key_heads=key_heads, num_value_heads=heads, key_dim=key_dim, value_dim=value_dim)
        keys = key_heads * key_dim
        qkv, gates = self._random(self._rows, 2 * keys + heads * value_dim + 3), self._random(self._rows, 2 * heads)
        log_decay, time_bias = self._random(heads), self._random(heads)

        def run(sequences: _Sequences, rows: slice) -> torch.Tensor:
            given, given_gates = qkv[rows].clone(), gates[rows].clone()
            output = self.machine.poisoned((len(given), heads * value_dim), torch.float32)
            self.machine.kernels.enqueue_gated_delta(
                states=sequences.argument,
                shape=shape,
                stride=given.shape[1],
                qkv=given.data_ptr(),
                gates=given_gates.data_ptr(),
                log_decay=log_decay.data_ptr(),
                time_bias=time_bias.data_ptr(),
                update_scale=_UPDATE_SCALE,
                output=output.data_ptr(),
                stream=self.machine.stream(),
            )
            self.machine.synchronize()
            return output

        def advance(row: int, state: torch.Tensor) -> torch.Tensor:
            q, k, v = qkv[row, : 2 * keys + heads * value_dim].double().split((keys, keys, heads * value_dim))
            q, k = (_normalized(x.view(key_heads, key_dim)).repeat_interleave(heads // key_heads, 0) for x in (q, k))
            beta, time = gates[row].double().split(heads)
            decay = _decay(log_decay, _softplus(time + time_bias))
            kept = state.view(heads, key_dim, value_dim)
            kept *= decay[:, None, None]
            known = (k[:, :, None] * kept).sum(1)
            change = (v.view(heads, value_dim) - known) * (beta.sigmoid() * _UPDATE_SCALE)[:, None]
            kept += k[:, :, None] * change[:, None]
            return (q[:, :, None] * kept).sum(1).flatten() / key_dim**0.5

        name = f"gated delta {key_heads} of {heads} heads {key_dim} x {value_dim}"
        yield from self._checks(name, run, advance, heads * key_dim * value_dim)

    def selective_scan(self, heads: int, head_dim: int, groups: int, state_dim: int) -> Iterator[Check]:
        """Checks Mamba 2's scan."""
        shape = ScanShape(num_heads=heads, head_dim=head_dim, num_groups=groups, state_dim=state_dim)
        sizes = (heads * head_dim, groups * state_dim, groups * state_dim, heads)
        values = self._random(self._rows, sum(sizes) + 3)
        log_decay, time_bias, skip = (self._random(heads) for _ in range(3))

        def run(sequences: _Sequences, rows: slice) -> torch.Tensor:
            given = values[rows].clone()
            output = self.machine.poisoned((len(given), heads * head_dim), torch.float32)
            self.machine.kernels.enqueue_selective_scan(
                states=sequences.argument,
                shape=shape,
                stride=given.shape[1],
                values=given.data_ptr(),
                log_decay=log_decay.data_ptr(),
                time_bias=time_bias.data_ptr(),
                skip=skip.data_ptr(),
                time_min=_TIMES[0],
                time_max=_TIMES[1],
                output=output.data_ptr(),
                stream=self.machine.stream(),
            )
            self.machine.synchronize()
            return output

        def advance(row: int, state: torch.Tensor) -> torch.Tensor:
            x, b, c, dt = values[row, : sum(sizes)].double().split(sizes)
            b, c = (part.view(groups, state_dim).repeat_interleave(heads // groups, 0) for part in (b, c))
            time = _softplus(dt + time_bias).clamp(*_TIMES)
            kept = state.view(heads, state_dim, head_dim)
            kept *= _decay(log_decay, time)[:, None, None]
            x = x.view(heads, head_dim)
            kept += b[:, :, None] * (x * time[:, None])[:, None]
            return ((c[:, :, None] * kept).sum(1) + skip.double()[:, None] * x).flatten()

        name = f"scan {heads} heads of {head_dim}, {groups} groups of {state_dim}"
        yield from self._checks(name, run, advance, heads * head_dim * state_dim)

    def gated_norm(self, dtype: torch.dtype, rows: int, width: int, group: int) -> Iterator[Check]:
        """Checks norms of groups, with a gate before or after them."""
        x, gate, weight = self._random(rows, width), self._random(rows, width), self._random(width)
        for first in (False, True):
            output = self.machine.poisoned((rows, width), dtype)
            self.machine.kernels.enqueue_gated_rms_norm(
                dtype=KERNEL_DTYPES[dtype].value,
                rows=rows,
                width=width,
                group=group,
                weight_size=width,
                input=x.data_ptr(),
                gate=gate.data_ptr(),
                weight=weight.data_ptr(),
                epsilon=_EPSILON,
                gate_first=first,
                output=output.data_ptr(),
                stream=self.machine.stream(),
            )
            self.machine.synchronize()
            factor = gate.double() * gate.double().sigmoid()
            groups = (x.double() * factor if first else x.double()).view(rows, -1, group)
            normed = (groups / (groups.square().mean(-1, keepdim=True) + _EPSILON).sqrt()).view(rows, width) * weight
            expected = normed if first else normed * factor
            order = "after" if first else "before"
            yield self._check(f"states norm {order} a gate {_name(dtype)} {rows} x {width}", output, expected)

    def sigmoid_gate(self, dtype: torch.dtype, rows: int, width: int) -> Check:
        """Checks a gate in place."""
        x, gate = self._random(rows, width).to(dtype), self._random(rows, width).to(dtype)
        output = x.clone()
        self.machine.kernels.enqueue_sigmoid_gate(
            dtype=KERNEL_DTYPES[dtype].value,
            rows=rows,
            width=width,
            gate=gate.data_ptr(),
            output=output.data_ptr(),
            stream=self.machine.stream(),
        )
        self.machine.synchronize()
        expected = x.double() * gate.double().sigmoid()
        return self._check(f"states sigmoid gate {_name(dtype)} {rows} x {width}", output, expected)

    @property
    def _rows(self) -> int:
        return sum(self.lengths)

    def _checks(self, name: str, run: Run, advance: Next, state_size: int) -> Iterator[Check]:
        """Compares outputs and states of all sequences, and the bits of the last one alone, in two steps."""
        before = self._random(len(self.lengths), state_size)
        offsets = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        sequences = self._sequences(offsets, before)
        found = run(sequences, slice(None))
        expected, states = [], before.double()
        for i in range(len(self.lengths)):
            state = states[len(self.lengths) - 1 - i]
            expected += [advance(row, state) for row in range(offsets[i], offsets[i + 1])]
        yield self._check(f"states {name}", found, torch.stack(expected))
        yield self._check(f"states {name}: states", sequences.states, states)
        begin, end = offsets[-2:]
        middle = begin + (end - begin) // 3
        alone = self._sequences([0, 0], before[:1])
        parts = []
        for first, last in ((begin, middle), (middle, end)):
            alone.offsets[1] = last - first
            parts.append(run(alone, slice(first, last)))
        same = torch.equal(torch.cat(parts), found[begin:]) and torch.equal(alone.states[0], sequences.states[0])
        yield Check(f"states {name}: bits alone and in chunks", same, f"seed {self.seed}")

    def _sequences(self, offsets: list[int], states: torch.Tensor) -> _Sequences:
        def integers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.machine.device)

        return _Sequences(integers(offsets), integers(list(reversed(range(len(offsets) - 1)))), states.clone())

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.machine.device, generator=self.generator)

    def _check(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> Check:
        bound = expected.abs() * _ROUNDING[actual.dtype] + expected.abs().max() * _TOLERANCE
        wrong = int((~((actual.double() - expected).abs() <= bound)).sum())
        return Check(name, wrong == 0, f"{wrong} wrong elements with seed {self.seed}")


def _convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Advances a state [taps - 1, width], the inputs of earlier tokens, by x."""
    inputs = torch.cat([state, x[None]])
    state.copy_(inputs[1:])
    return (inputs * weight).sum(0) + bias


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(x.double())


def _decay(log_decay: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    return (-log_decay.double().exp() * time).exp()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

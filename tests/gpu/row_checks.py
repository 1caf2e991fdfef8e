"""Checks of the kernels that compute rows: against float64, single rows against batches, and launches in a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from machine import KERNEL_DTYPES, Machine
from results import Check

from adaptrt._core import LinearEpilogue, RopeKind

DTYPES = (torch.float16, torch.bfloat16)
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}
_SMALLEST = 2.0**-25
_EPSILON = 1e-5
_THRESHOLD = 0.5
_ORIGINAL = 64


def row_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Runs all checks, or a `subset` small enough for compute-sanitizer and the emulation."""
    generator = torch.Generator(machine.device)
    rows = _Rows(machine, generator, generator.seed())
    for dtype in DTYPES:
        for width in (8, 96, 1032) if subset else (8, 96, 1032, 2048, 4096, 5120, 8192, 8200, 16384):
            for tokens in (1, 5) if subset else (1, 5, 64, 1000):
                yield from rows.embedding(dtype, tokens, width)
                yield from rows.norm(dtype, tokens, width)
                yield from rows.layer_norm(dtype, tokens, width)
                yield rows.added_norm(dtype, tokens, width)
                yield rows.scaled_norm(dtype, tokens, width)
                yield from rows.gated_columns(dtype, tokens, width)
                yield from rows.addition(dtype, tokens, width)
                yield rows.gated_add(dtype, tokens, width)
                yield rows.cast(dtype, tokens, width)
                yield rows.xielu(dtype, tokens, width)
            for heads, kv_heads in ((3, 1),) if subset else ((3, 1), (32, 8)):
                if width <= 1032:
                    yield from rows.head_norms(dtype, 5, heads, kv_heads, width)
                    yield from rows.value_norms(dtype, 5, heads, kv_heads, width)
                if 16 <= width <= 256:
                    for interleaved in (False, True):
                        yield from rows.head_norms(
                            dtype, 5, heads, kv_heads, width, half=width // 16 * 8, interleaved=interleaved
                        )
        for epilogue in LinearEpilogue:
            if epilogue != LinearEpilogue.ADD:
                for tokens, width in ((3, 72),) if subset else ((1, 14336), (3, 72), (333, 4096)):
                    yield from rows.finish(dtype, tokens, width, epilogue)
        if machine.is_gpu:
            yield rows.graph(dtype)
    for tokens in (1, 257) if subset else (1, 255, 256, 257, 4096):
        yield rows.taken_tokens(tokens)
    for kind in RopeKind:
        yield from rows.rope(kind, 20 if subset else 64)
    for width in (1, 1021, 4096) if subset else (1, 1021, 4096, 32064, 128256, 151937):
        for count in (1, 5) if subset else (1, 5, 64, 200):
            yield from rows.logits(count, width)
            yield rows.highest(count, width)


def _exp_of_minus(values: np.ndarray) -> np.ndarray:
    """adaptrt/core/exp_of_minus.h in float32."""
    single = np.float32
    clamped = -np.minimum(values, single(87))
    shifted = clamped * single(1.44269504) + single(12582912.0)
    n = shifted - single(12582912.0)
    r = (clamped - n * single(0.693359375)) - n * single(-2.12194440e-4)
    p = np.full_like(r, single(1) / single(720))
    for divisor in (120, 24, 6, 2, 1, 1):
        p = p * r + single(1) / single(divisor)
    exponent = (shifted.view(np.uint32) - np.uint32(0x4B400000) + np.uint32(127)) << np.uint32(23)
    result: np.ndarray = np.where(values > 87, single(0), p * exponent.view(np.float32))
    return result


def _sum_of_exponentials(row: np.ndarray) -> float:
    """sum_of_exponentials() of sample/row_math.h: sums of 256 logits in 16 lanes."""
    weights = _exp_of_minus(row.max() - row).astype(np.float64)
    total = 0.0
    for begin in range(0, len(row), 256):
        part = weights[begin : begin + 256]
        complete = len(part) // 16 * 16
        lanes = np.zeros(16)
        for group in part[:complete].reshape(-1, 16):
            lanes += group
        of_part = 0.0
        for value in (*lanes, *part[complete:]):
            of_part += value
        total += of_part
    return total


@dataclass(frozen=True)
class _Rows:
    machine: Machine
    generator: torch.Generator
    seed: int

    def embedding(self, dtype: torch.dtype, tokens: int, width: int) -> Iterator[Check]:
        """Checks rows of a table, with and without rows of positions."""
        table, positions = self._random((50, width), dtype), self._random((20, width), dtype)
        token_ids, position_ids = self._indices(tokens, 50), self._indices(tokens, 20)
        for has_positions in (False, True):
            output = self.machine.poisoned((tokens, width), torch.float32)
            self.machine.kernels.enqueue_embedding(
                dtype=KERNEL_DTYPES[dtype].value,
                tokens=tokens,
                width=width,
                vocabulary=len(table),
                table=table.data_ptr(),
                token_ids=token_ids.data_ptr(),
                scale=1.5,
                positions=positions.data_ptr() if has_positions else 0,
                position_ids=position_ids.data_ptr(),
                output=output.data_ptr(),
                stream=self.machine.stream(),
            )
            terms = [table[token_ids.long()].double() * 1.5]
            if has_positions:
                terms.append(positions[position_ids.long()].double())
            extra = sum(term.abs() for term in terms) * 2.0**-22
            name = f"rows embedding {_name(dtype)} {tokens} x {width}{' with positions' if has_positions else ''}"
            yield self._check(name, output, sum(terms), extra)

    def gated_add(self, dtype: torch.dtype, tokens: int, width: int) -> Check:
        """Checks the sum of a stream and of gated rows."""
        added, gate = self._random((tokens, width), dtype), 4 * self._random((tokens,), torch.float32)
        before = self._random((tokens, width), torch.float32)
        stream = before.clone()
        self.machine.kernels.enqueue_gated_add(
            dtype=KERNEL_DTYPES[dtype].value,
            tokens=tokens,
            width=width,
            input=added.data_ptr(),
            gate=gate.data_ptr(),
            residual=stream.data_ptr(),
            stream=self.machine.stream(),
        )
        gated = torch.sigmoid(gate.double())[:, None] * added.double()
        extra = (before.double().abs() + gated.abs()) * 2.0**-20
        return self._check(f"rows gated add {_name(dtype)} {tokens} x {width}", stream, before.double() + gated, extra)

    def norm(self, dtype: torch.dtype, tokens: int, width: int) -> Iterator[Check]:
        """Checks norms of all rows and of gathered rows, and a row by itself."""
        before, addend = self._random((tokens, width), torch.float32), self._random((tokens, width), dtype)
        weight = self._random((width,), torch.float32)
        added = before + addend.float()
        name = f"rows norm {_name(dtype)} {tokens} x {width}"
        residual = before.clone()
        output = self._norm(residual, addend, None, weight, dtype)
        expected = _rms_norm(added, weight)
        yield self._check(name, output, expected, expected.abs() * 2.0**-19)
        yield Check(f"{name}: the residual stream", torch.equal(residual, added), f"seed {self.seed}")
        row_ids = self._indices(7, tokens)
        residual = before.clone()
        gathered = self._norm(residual, addend, row_ids, weight, dtype)
        same = torch.equal(gathered.view(torch.int16), output[row_ids.long()].view(torch.int16))
        yield Check(f"{name}: gathered rows", same and torch.equal(residual, before), f"seed {self.seed}")
        row = tokens // 2
        alone = self._norm(before[row : row + 1].clone(), addend[row : row + 1].clone(), None, weight, dtype)
        same = torch.equal(alone.view(torch.int16), output[row : row + 1].view(torch.int16))
        yield Check(f"{name}: bits of a row alone", same, f"seed {self.seed}")
        exact = self._norm(before.clone(), addend, None, weight, dtype, torch.float32)
        yield Check(f"{name} to float32", _same_bits(exact.to(dtype), output), f"seed {self.seed}")
        plain = self._norm(before.clone(), None, None, weight, dtype)
        expected = _rms_norm(before, weight)
        yield self._check(f"{name} without an addend", plain, expected, expected.abs() * 2.0**-19)

    def _norm(
        self,
        residual: torch.Tensor,
        addend: torch.Tensor | None,
        row_ids: torch.Tensor | None,
        weight: torch.Tensor,
        dtype: torch.dtype,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        rows = len(residual) if row_ids is None else len(row_ids)
        output = self.machine.poisoned((rows, residual.shape[1]), dtype if output_dtype is None else output_dtype)
        self._enqueue_norm(residual, addend, row_ids, weight, output, dtype)
        self.machine.synchronize()
        return output

    def _enqueue_norm(
        self,
        residual: torch.Tensor,
        addend: torch.Tensor | None,
        row_ids: torch.Tensor | None,
        weight: torch.Tensor,
        output: torch.Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.machine.kernels.enqueue_rms_norm(
            dtype=KERNEL_DTYPES[output.dtype if dtype is None else dtype].value,
            rows=len(output),
            width=output.shape[1],
            residual=residual.data_ptr(),
            addend=0 if addend is None else addend.data_ptr(),
            row_ids=0 if row_ids is None else row_ids.data_ptr(),
            weight=weight.data_ptr(),
            epsilon=_EPSILON,
            output=output.data_ptr(),
            float32_output=output.dtype == torch.float32,
            stream=self.machine.stream(),
        )

    def layer_norm(self, dtype: torch.dtype, tokens: int, width: int) -> Iterator[Check]:
        """Checks layer norms of all rows, with and without bias and addend, rounded and in float32; and a row by
        itself."""
        before, addend = self._random((tokens, width), torch.float32), self._random((tokens, width), dtype)
        weight, bias = self._random((width,), torch.float32), self._random((width,), torch.float32)
        # The mean is far from 0, as in real streams.
        before += 3.0
        for has_more, output_dtype in ((True, dtype), (False, torch.float32)):
            name = f"rows layer norm {_name(dtype)} {tokens} x {width} to {_name(output_dtype)}"
            residual = before.clone()
            more = (addend, bias) if has_more else (None, None)
            output = self._layer_norm(residual, *more, weight, dtype, output_dtype)
            added = before + addend.float() if has_more else before
            expected = _layer_norm(added, weight, bias if has_more else None)
            size = (expected - (bias.double() if has_more else 0.0)).abs() + weight.abs().double() * 8
            yield self._check(name, output, expected, size * 2.0**-18)
            yield Check(f"{name}: the residual stream", torch.equal(residual, added), f"seed {self.seed}")
            row = slice(tokens // 2, tokens // 2 + 1)
            more = (addend[row].clone(), bias) if has_more else (None, None)
            alone = self._layer_norm(before[row].clone(), *more, weight, dtype, output_dtype)
            yield Check(f"{name}: bits of a row alone", _same_bits(alone, output[row]), f"seed {self.seed}")
        yield self._shifted_norm(before, weight, bias, dtype)

    def _shifted_norm(
        self, before: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype
    ) -> Check:
        """Checks that the shifts of rows' adapters are added to the bias, bit by bit."""
        device, (tokens, width) = before.device, before.shape
        shifts = self._random((2, width), torch.float32)
        # Two entries of each of three adapters; the second adapter has no shift.
        table = torch.tensor([1, shifts[0].data_ptr(), 1, 0, 1, shifts[1].data_ptr()], device=device)
        slots = torch.randint(-1, 3, (tokens,), generator=self.generator, device=device).int()
        output = self.machine.poisoned((tokens, width), dtype)
        self._enqueue_layer_norm(before.clone(), None, bias, weight, output, slots=slots, shifts=table)
        self.machine.synchronize()
        expected = torch.empty_like(output)
        for slot, own in ((-1, bias), (0, bias + shifts[0]), (1, bias), (2, bias + shifts[1])):
            rows = self._layer_norm(before.clone(), None, own, weight, dtype, dtype)
            expected[slots == slot] = rows[slots == slot]
        name = f"rows layer norm {_name(dtype)} {tokens} x {width} with shifts of adapters"
        return Check(name, _same_bits(output, expected), f"seed {self.seed}")

    def _layer_norm(
        self,
        residual: torch.Tensor,
        addend: torch.Tensor | None,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        dtype: torch.dtype,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        output = self.machine.poisoned(tuple(residual.shape), output_dtype)
        self._enqueue_layer_norm(residual, addend, bias, weight, output, dtype=dtype)
        self.machine.synchronize()
        return output

    def _enqueue_layer_norm(
        self,
        residual: torch.Tensor,
        addend: torch.Tensor | None,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        output: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        slots: torch.Tensor | None = None,
        shifts: torch.Tensor | None = None,
    ) -> None:
        """dtype: the engine's; None: the output's. slots, shifts: adapters with two entries, the second the norm's."""
        self.machine.kernels.enqueue_layer_norm(
            dtype=KERNEL_DTYPES[output.dtype if dtype is None else dtype].value,
            rows=len(residual),
            width=residual.shape[1],
            residual=residual.data_ptr(),
            addend=0 if addend is None else addend.data_ptr(),
            weight=weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            adapter_slots=0 if slots is None else slots.data_ptr(),
            shifts=0 if shifts is None else shifts.data_ptr(),
            slot_entries=2,
            entry=1,
            epsilon=_EPSILON,
            output=output.data_ptr(),
            float32_output=output.dtype == torch.float32,
            stream=self.machine.stream(),
        )

    def added_norm(self, dtype: torch.dtype, tokens: int, width: int) -> Check:
        """Checks norms after a sublayer, which are added to the residual stream."""
        before, rows = self._random((tokens, width), torch.float32), self._random((tokens, width), dtype)
        weight = self._random((width,), torch.float32)
        residual = before.clone()
        self.machine.kernels.enqueue_added_norm(
            dtype=KERNEL_DTYPES[dtype].value,
            rows=tokens,
            width=width,
            input=rows.data_ptr(),
            weight=weight.data_ptr(),
            epsilon=_EPSILON,
            residual=residual.data_ptr(),
            stream=self.machine.stream(),
        )
        added = _rms_norm(rows, weight)
        extra = (added.abs() + before.abs().double()) * 2.0**-19
        name = f"rows added norm {_name(dtype)} {tokens} x {width}"
        return self._check(name, residual, before.double() + added, extra)

    def scaled_norm(self, dtype: torch.dtype, tokens: int, width: int) -> Check:
        """Checks a norm of float32 rows, which is added to the residual stream before that is scaled."""
        before, rows = (self._random((tokens, width), torch.float32) for _ in range(2))
        weight, scale = self._random((width,), torch.float32), self._random((1,), torch.float32)
        residual = before.clone()
        self.machine.kernels.enqueue_added_norm(
            dtype=KERNEL_DTYPES[dtype].value,
            rows=tokens,
            width=width,
            input=rows.data_ptr(),
            float32_input=True,
            weight=weight.data_ptr(),
            epsilon=_EPSILON,
            sum_scale=scale.data_ptr(),
            residual=residual.data_ptr(),
            stream=self.machine.stream(),
        )
        added = _rms_norm(rows, weight)
        extra = (added.abs() + before.abs().double()) * scale.abs() * 2.0**-19
        name = f"rows added norm of float32 {_name(dtype)} {tokens} x {width}"
        return self._check(name, residual, (before.double() + added) * scale.double(), extra)

    def gated_columns(self, dtype: torch.dtype, tokens: int, width: int) -> Iterator[Check]:
        """Checks columns that are multiplied by an activated gate."""
        stride, first = 2 * width + 16, width + 8
        gate, values = self._random((tokens, width), dtype, 3.0), self._random((tokens, stride), torch.float32)
        for epilogue in (LinearEpilogue.SILU_MUL, LinearEpilogue.GELU_MUL, LinearEpilogue.GELU_TANH_MUL):
            output = self.machine.poisoned((tokens, width), dtype)
            self.machine.kernels.enqueue_gated_columns(
                dtype=KERNEL_DTYPES[dtype].value,
                tokens=tokens,
                width=width,
                stride=stride,
                first_column=first,
                activation=epilogue.value,
                gate=gate.data_ptr(),
                values=values.data_ptr(),
                output=output.data_ptr(),
                stream=self.machine.stream(),
            )
            columns = values[:, first : first + width].double()
            expected = _finished(epilogue, gate.double(), columns)
            extra = (gate.double().abs() + 1) * (columns.abs() + 1) * 2.0**-19
            yield self._check(
                f"rows gated columns {_name(dtype)} {epilogue.name} {tokens} x {width}", output, expected, extra
            )

    def value_norms(self, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, size: int) -> Iterator[Check]:
        """Checks norms of the heads of v, and values that are the keys before their norm."""
        for from_keys in (False, True):
            parts = (heads * size, kv_heads * size, *(() if from_keys else (kv_heads * size,)))
            before = self._random((tokens, sum(parts)), dtype)
            weights = [self._random((size,), torch.float32) for _ in range(3)]
            qkv, values = before.clone(), self.machine.poisoned(tuple(before.shape), dtype)
            self.machine.kernels.enqueue_head_norms(
                dtype=KERNEL_DTYPES[dtype].value,
                tokens=tokens,
                stride=before.shape[1],
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_size=size,
                query_weight=weights[0].data_ptr(),
                key_weight=weights[1].data_ptr(),
                value_weight=weights[2].data_ptr(),
                epsilon=_EPSILON,
                qkv=qkv.data_ptr(),
                values_from_keys=values.data_ptr() if from_keys else 0,
                stream=self.machine.stream(),
            )
            sources, found = list(before.split(parts, 1)), list(qkv.split(parts, 1))
            if from_keys:
                sources.append(sources[1])
                found.append(values[:, : kv_heads * size])
            name = f"rows norms of values {_name(dtype)} {heads} + {kv_heads} heads of {size}"
            for part, rows, actual, weight in zip("qkv", sources, found, weights, strict=True):
                expected = _rms_norm(rows.reshape(-1, size), weight).view_as(rows)
                kind = " from keys" if from_keys else ""
                yield self._check(f"{name}{kind}: {part}", actual, expected, expected.abs() * 2.0**-19)

    def head_norms(
        self,
        dtype: torch.dtype,
        tokens: int,
        heads: int,
        kv_heads: int,
        size: int,
        *,
        half: int = 0,
        interleaved: bool = False,
    ) -> Iterator[Check]:
        """Checks norms of the heads of q and k, after a rotation if there is a half; v does not change."""
        before = self._random((tokens, (heads + 2 * kv_heads) * size), dtype)
        query_weight, key_weight = self._random((size,), torch.float32), self._random((size,), torch.float32)
        cosine, sine = (self._random((tokens, half), torch.float32) for _ in range(2))
        qkv = before.clone()
        self.machine.kernels.enqueue_head_norms(
            dtype=KERNEL_DTYPES[dtype].value,
            tokens=tokens,
            stride=before.shape[1],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            query_weight=query_weight.data_ptr(),
            key_weight=key_weight.data_ptr(),
            epsilon=_EPSILON,
            qkv=qkv.data_ptr(),
            rotary_half=half,
            interleaved=interleaved,
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            stream=self.machine.stream(),
        )
        name = f"rows head norms {_name(dtype)} {heads} + {kv_heads} heads of {size}, rotated half {half}"
        name += " of neighbours" if interleaved else ""
        parts = (heads * size, kv_heads * size, kv_heads * size)
        found = qkv.split(parts, 1)
        for part, rows, actual, weight in zip(
            ("q", "k"), before.split(parts, 1), found, (query_weight, key_weight), strict=False
        ):
            group = rows.double().view(tokens, -1, size)
            rotated = _rotated(group, cosine.double(), sine.double(), interleaved=interleaved)
            expected = _rms_norm(rotated.reshape(-1, size), weight).view_as(rows)
            yield self._check(f"{name}: {part}", actual, expected, expected.abs() * 2.0**-19 + 2.0**-19 * (half > 0))
        same = _same_bits(found[2], before.split(parts, 1)[2])
        yield Check(f"{name}: v is unchanged", same, f"seed {self.seed}")

    def cast(self, dtype: torch.dtype, tokens: int, width: int) -> Check:
        """Checks that rounding is exactly that of torch."""
        rows = self._random((tokens, width), torch.float32)
        output = self.machine.poisoned((tokens, width), dtype)
        self.machine.kernels.enqueue_cast(
            dtype=KERNEL_DTYPES[dtype].value,
            elements=tokens * width,
            input=rows.data_ptr(),
            output=output.data_ptr(),
            stream=self.machine.stream(),
        )
        self.machine.synchronize()
        name = f"rows cast {_name(dtype)} {tokens} x {width}"
        return Check(name, _same_bits(output, rows.to(dtype)), f"seed {self.seed}")

    def xielu(self, dtype: torch.dtype, tokens: int, width: int) -> Check:
        """Checks xIELU on both sides of zero."""
        rows = self._random((tokens, width), dtype, 3.0)
        output = self.machine.poisoned((tokens, width), dtype)
        positive, negative, linear, bound = 0.8, 1.3, 0.5, -1e-6
        self.machine.kernels.enqueue_xielu(
            dtype=KERNEL_DTYPES[dtype].value,
            elements=tokens * width,
            positive=positive,
            negative=negative,
            linear=linear,
            bound=bound,
            input=rows.data_ptr(),
            output=output.data_ptr(),
            stream=self.machine.stream(),
        )
        x = rows.double()
        below = negative * (torch.expm1(x.clamp(max=bound)) - x)
        expected = torch.where(x > 0, positive * x * x, below) + linear * x
        return self._check(f"rows xielu {_name(dtype)} {tokens} x {width}", output, expected, (x * x + 1) * 2.0**-19)

    def addition(self, dtype: torch.dtype, tokens: int, width: int) -> Iterator[Check]:
        """Checks that sums are exactly those of float32."""
        residual, addend = self._random((tokens, width), torch.float32), self._random((tokens, width), dtype)
        expected = residual + addend.float()
        self.machine.kernels.enqueue_addition(
            dtype=KERNEL_DTYPES[dtype].value,
            elements=tokens * width,
            residual=residual.data_ptr(),
            addend=addend.data_ptr(),
            stream=self.machine.stream(),
        )
        self.machine.synchronize()
        name = f"rows addition {_name(dtype)} {tokens} x {width}"
        yield Check(name, torch.equal(residual, expected), f"seed {self.seed}")

    def finish(self, dtype: torch.dtype, tokens: int, width: int, epilogue: LinearEpilogue) -> Iterator[Check]:
        """Checks an epilogue with and without bias, scale and soft cap, and a row by itself."""
        parts = 2 if epilogue in _GATED else 1
        product = self._random((tokens, parts * width), dtype, 4.0)
        bias = self._random((parts * width,), torch.float32)
        for has_more in (False, True):
            output = self.machine.poisoned((tokens, width), dtype)
            self._enqueue_finish(product, bias if has_more else None, epilogue, output)
            y = product.double()
            if has_more:
                y += bias.double()
                y[:, :width] *= 0.25  # the scale is that of the gates
                y = 5.0 * torch.tanh(y / 5.0)
            gated, linear = (y[:, :width], y[:, width:]) if parts == 2 else (y, torch.zeros_like(y))
            expected = _finished(epilogue, gated, linear)
            extra = (gated.abs() + 1) * (linear.abs() + 1) * 2.0**-19
            # Values next to a bound may fall on either side of it.
            near = (gated - _THRESHOLD).abs() < 1e-5
            name = f"rows finish {_name(dtype)} {epilogue.name} {tokens} x {width}{' with bias' if has_more else ''}"
            yield self._check(name, output, expected, torch.where(near, math.inf, extra))
            row = self.machine.poisoned((1, width), dtype)
            self._enqueue_finish(product[-1:].clone(), bias if has_more else None, epilogue, row)
            self.machine.synchronize()
            same = torch.equal(row.view(torch.int16), output[-1:].view(torch.int16))
            yield Check(f"{name}: bits of a row alone", same, f"seed {self.seed}")

    def _enqueue_finish(
        self, product: torch.Tensor, bias: torch.Tensor | None, epilogue: LinearEpilogue, output: torch.Tensor
    ) -> None:
        self.machine.kernels.enqueue_finish(
            dtype=KERNEL_DTYPES[output.dtype].value,
            tokens=len(output),
            width=output.shape[1],
            product=product.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            scale=1.0 if bias is None else 0.25,
            softcap=0.0 if bias is None else 5.0,
            epilogue=epilogue.value,
            threshold=_THRESHOLD,
            output=output.data_ptr(),
            stream=self.machine.stream(),
        )

    def rope(self, kind: RopeKind, half: int) -> Iterator[Check]:
        """Checks the angles of sequences below and above the original maximum, at small and large positions."""
        # Prompt length, first position and tokens of each sequence.
        chunks = ((40, 0, 40), (100, 10, 30), (7, 3, 0), (50, 60, 10), (3, 131071, 1), (1 << 20, 1 << 19, 300))
        device = self.machine.device
        offsets = torch.tensor([0, *(chunk[2] for chunk in chunks)], device=device).cumsum(0).int()
        lengths = torch.tensor([chunk[0] for chunk in chunks], dtype=torch.int32, device=device)
        places = [torch.arange(first, first + count, dtype=torch.int32) for _, first, count in chunks]
        positions = torch.cat(places).to(device)
        frequencies = (10000.0 ** (-torch.arange(half, device=device).double() / half)).float()
        long = frequencies / 3
        tables = [self.machine.poisoned((len(positions), half), torch.float32) for _ in range(2)]
        self.machine.kernels.enqueue_rope_table(
            tokens=len(positions),
            half=half,
            kind=kind.value,
            attention_scaling=1.25,
            base=10000.0,
            factor=4.0,
            original_max_position=_ORIGINAL,
            inverse_frequencies=frequencies.data_ptr(),
            long_inverse_frequencies=long.data_ptr(),
            positions=positions.data_ptr(),
            sequences=len(chunks),
            sequence_offsets=offsets.data_ptr(),
            prompt_lengths=lengths.data_ptr(),
            cosine=tables[0].data_ptr(),
            sine=tables[1].data_ptr(),
            stream=self.machine.stream(),
        )
        counts = torch.tensor([chunk[2] for chunk in chunks], device=device)
        reached = torch.maximum(lengths.repeat_interleave(counts), positions + 1)[:, None]
        inverse = frequencies.expand(len(positions), half)
        if kind == RopeKind.LONG:
            inverse = torch.where(reached > _ORIGINAL, long, frequencies)
        if kind == RopeKind.DYNAMIC:
            base = 10000.0 * (4.0 * reached.double() / _ORIGINAL - 3.0) ** (half / (half - 1))
            grown = (base ** (-torch.arange(half, device=device).double() / half)).float()
            inverse = torch.where(reached > _ORIGINAL, grown, frequencies)
        angles = (positions.float()[:, None] * inverse).double()
        doubt = angles * 2.0**-22 if kind == RopeKind.DYNAMIC else torch.zeros_like(angles)
        for name, table, expected in zip(("cosine", "sine"), tables, (angles.cos(), angles.sin()), strict=True):
            yield self._check(f"rows rope {kind.name} {name}", table, expected * 1.25, 1.25 * (doubt + 2.0**-23))

    def logits(self, rows: int, width: int) -> Iterator[Check]:
        """Checks the best tokens of rows with equal maxima or without a usable one, and the soft cap."""
        stride = width + rows % 2 * 3
        logits = self._random((rows, stride), torch.float32)
        logits[0] = -math.inf
        for row in range(1, rows):
            places = self._indices(3, width).long()
            logits[row, places] = logits.new_tensor(50.0 if row % 2 else torch.finfo(torch.float32).max)
        for row, bad in zip(range(2, rows), (math.nan, math.inf), strict=False):
            logits[row, int(self._indices(1, width)[0])] = bad
        logits[:, width:] = math.nan
        tokens = self.machine.poisoned((rows,), torch.int32)
        self.machine.kernels.enqueue_best_tokens(
            rows=rows,
            width=width,
            stride=stride,
            logits=logits.data_ptr(),
            tokens=tokens.data_ptr(),
            stream=self.machine.stream(),
        )
        self.machine.synchronize()
        logits = logits[:, :width]
        at = torch.arange(width, device=logits.device).expand(rows, width)
        first = torch.where(logits == logits.amax(1, keepdim=True), at, width).amin(1)
        first[0] = -2  # kEveryTokenForbidden
        first[2:4] = -1  # kUnusableLogits
        yield Check(f"rows best tokens {rows} x {width}", torch.equal(tokens.long(), first), f"seed {self.seed}")
        yield self._padded_logits(rows, width)
        for bias in (None, self._random((width,), torch.float32)) if width % 8 == 0 else (None,):
            scores = self._random((rows, width), torch.float32, 100.0)
            sums = scores.double() if bias is None else scores.double() + bias.double()
            expected = 30.0 * torch.tanh(sums * 0.5 / 30.0)
            self.machine.kernels.enqueue_finish_logits(
                elements=rows * width,
                logits=scores.data_ptr(),
                scale=0.5,
                softcap=30.0,
                bias=0 if bias is None else bias.data_ptr(),
                width=width,
                stream=self.machine.stream(),
            )
            name = f"rows soft cap of logits {rows} x {width}{'' if bias is None else ' with bias'}"
            yield self._check(name, scores, expected, (expected.abs() + 1.0) * 2.0**-20)

    def taken_tokens(self, tokens: int) -> Check:
        """Checks that ids which stand for rows of an earlier run become their best tokens, and that others stay."""
        limit = 300
        best = self._indices(limit, 1000) - 2  # -1 and -2: rows without a best token
        ids = self._indices(tokens + 8, 2 * limit) - limit
        expected = torch.where(ids < 0, best[(-1 - ids).clamp(min=0).long()].clamp(min=0), ids)
        expected[tokens:] = ids[tokens:]
        self.machine.kernels.enqueue_take_tokens(
            tokens=tokens,
            best_tokens=best.data_ptr(),
            token_ids=ids.data_ptr(),
            stream=self.machine.stream(),
        )
        self.machine.synchronize()
        return Check(f"rows take {tokens} tokens", torch.equal(ids, expected), f"seed {self.seed}")

    def highest(self, rows: int, width: int) -> Check:
        """Checks the highest logits and the summaries of rows against the host's sampler, bit by bit."""
        stride, count = width + 4, min(width, 128)
        logits = self._random((rows, stride), torch.float32, 20.0)
        logits[:, width:] = math.nan
        for row in range(1, rows, 2):  # few different values
            logits[row, :width] = logits[row, :width].round()
        summaries = self.machine.poisoned((rows, 3), torch.float64)
        highest = self.machine.poisoned((rows, count, 2), torch.int32)
        self.machine.kernels.enqueue_find_highest(
            rows=rows,
            width=width,
            stride=stride,
            count=count,
            logits=logits.data_ptr(),
            summaries=summaries.data_ptr(),
            highest=highest.data_ptr(),
            stream=self.machine.stream(),
        )
        self.machine.synchronize()
        host = logits[:, :width].cpu().numpy()
        order = np.argsort(-host, axis=1, kind="stable")[:, :count].astype(np.int32)
        found = highest.cpu().numpy()
        facts = summaries.cpu().numpy()
        expected = np.zeros((rows, 6), np.int32)
        expected[:, :2] = np.array([_sum_of_exponentials(row) for row in host])[:, None].view(np.int32)
        expected[:, 2] = (host.max(axis=1) + np.float32(0)).view(np.int32)
        expected[:, 3] = (host.min(axis=1) + np.float32(0)).view(np.int32)
        expected[:, 4] = order[:, 0]
        passed = (
            np.array_equal(found[:, :, 1], order)
            and np.array_equal(found[:, :, 0], np.take_along_axis(host, order, axis=1).view(np.int32))
            and np.array_equal(facts.view(np.int32)[:, :5], expected[:, :5])
        )
        return Check(f"rows highest logits {rows} x {width}", passed, f"seed {self.seed}")

    def _padded_logits(self, rows: int, width: int) -> Check:
        """Checks that the padding of a product is left out, and that bias, scale and soft cap apply."""
        stride, logits_stride = width + 7, width + 3
        product, bias = self._random((rows, stride), torch.float32, 100.0), self._random((width,), torch.float32)
        product[:, width:] = math.nan
        logits = self.machine.poisoned((rows, logits_stride), torch.float32)
        self.machine.kernels.enqueue_finish_padded_logits(
            rows=rows,
            width=width,
            stride=stride,
            logits_stride=logits_stride,
            input=product.data_ptr(),
            logits=logits.data_ptr(),
            scale=0.5,
            softcap=30.0,
            bias=bias.data_ptr(),
            stream=self.machine.stream(),
        )
        expected = 30.0 * torch.tanh((product[:, :width].double() + bias.double()) * 0.5 / 30.0)
        name = f"rows padded logits {rows} x {width}"
        return self._check(name, logits[:, :width], expected, (expected.abs() + 1.0) * 2.0**-20)

    def graph(self, dtype: torch.dtype) -> Check:
        """Checks many captured launches, each of which waits for what the previous launch writes."""
        tokens, width, layers = 40, 4096, 50
        residual = self._random((tokens, width), torch.float32)
        weight = self._random((width,), torch.float32)
        product = self._random((tokens, width), dtype)

        def work() -> None:
            for _ in range(layers):
                self._enqueue_norm(residual, product, None, weight, product)
                self._enqueue_finish(product, None, LinearEpilogue.GELU_TANH, product)

        before = residual.clone(), product.clone()
        graph = self.machine.capture(work)
        residual.copy_(before[0])
        product.copy_(before[1])
        graph.replay()
        self.machine.synchronize()
        replayed = residual.clone(), product.clone()
        residual.copy_(before[0])
        product.copy_(before[1])
        for _ in range(layers):
            self._enqueue_norm(residual, product, None, weight, product)
            self.machine.synchronize()
            self._enqueue_finish(product, None, LinearEpilogue.GELU_TANH, product)
            self.machine.synchronize()
        same = torch.equal(residual, replayed[0]) and torch.equal(
            product.view(torch.int16), replayed[1].view(torch.int16)
        )
        return Check(f"rows {_name(dtype)}: {2 * layers} launches in a graph", same, f"seed {self.seed}")

    def _check(self, name: str, actual: torch.Tensor, expected: torch.Tensor, extra: torch.Tensor) -> Check:
        """Checks that errors are below the rounding of the actual type plus `extra`."""
        self.machine.synchronize()
        bound = expected.abs() * _ROUNDING[actual.dtype] + _SMALLEST + extra
        wrong = int((~((actual.double() - expected).abs() <= bound)).sum())
        return Check(name, wrong == 0, f"{wrong} wrong elements with seed {self.seed}")

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 2.0) -> torch.Tensor:
        numbers = torch.randn(shape, device=self.machine.device, generator=self.generator)
        return (numbers * scale).to(dtype)

    def _indices(self, count: int, limit: int) -> torch.Tensor:
        return torch.randint(limit, (count,), dtype=torch.int32, device=self.machine.device, generator=self.generator)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rotated(
    heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotates the first elements of [tokens, heads, size]: twice as many as the tables have columns."""
    half = cosine.shape[1]
    turned, rest = heads[..., : 2 * half], heads[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    cosine, sine = cosine[:, None], sine[:, None]
    pairs = [first * cosine - second * sine, second * cosine + first * sine]
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat([turned, rest], dim=-1)


def _rms_norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    exact = rows.double()
    return exact * (exact.square().mean(1, keepdim=True) + _EPSILON).rsqrt() * weight.double()


def _layer_norm(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    exact = rows.double()
    centred = exact - exact.mean(1, keepdim=True)
    normed = centred * (centred.square().mean(1, keepdim=True) + _EPSILON).rsqrt() * weight.double()
    return normed if bias is None else normed + bias.double()


def _same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    kind = torch.int32 if actual.dtype == torch.float32 else torch.int16
    return torch.equal(actual.contiguous().view(kind), expected.contiguous().view(kind))


def _gelu(y: torch.Tensor) -> torch.Tensor:
    return 0.5 * y * torch.special.erfc(-y / math.sqrt(2.0))


def _gelu_tanh(y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(y, approximate="tanh")


def _relu_gate(gated: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    return torch.where(gated > _THRESHOLD, gated * linear, 0.0)


def _clamped_silu(gated: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    gate = gated.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (linear.clamp(-7.0, 7.0) + 1)


_GATED: dict[LinearEpilogue, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    LinearEpilogue.SILU_MUL: lambda gated, linear: gated * torch.sigmoid(gated) * linear,
    LinearEpilogue.GELU_MUL: lambda gated, linear: _gelu(gated) * linear,
    LinearEpilogue.GELU_TANH_MUL: lambda gated, linear: _gelu_tanh(gated) * linear,
    LinearEpilogue.RELU_MUL: _relu_gate,
    LinearEpilogue.RELU_MUL_RELU: lambda gated, linear: _relu_gate(gated, linear.relu()),
    LinearEpilogue.CLAMPED_SILU_MUL: _clamped_silu,
}
_PLAIN: dict[LinearEpilogue, Callable[[torch.Tensor], torch.Tensor]] = {
    LinearEpilogue.STORE: lambda y: y,
    LinearEpilogue.GELU: _gelu,
    LinearEpilogue.GELU_TANH: _gelu_tanh,
    LinearEpilogue.RELU: torch.relu,
    LinearEpilogue.RELU_SQUARED: lambda y: torch.relu(y).square(),
}


def _finished(epilogue: LinearEpilogue, gated: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    if epilogue in _GATED:
        return _GATED[epilogue](gated, linear)
    return _PLAIN[epilogue](gated)

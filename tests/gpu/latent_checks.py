"""Checks of the kernels of latent attention: against float64, and sequences alone and together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from machine import KERNEL_DTYPES, Machine
from results import Check

_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_TOKENS_PER_BLOCK = 64


def latent_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Runs all checks, or a `subset` small enough for compute-sanitizer and the emulation."""
    generator = torch.Generator(machine.device)
    sizes = ((3, 24, 16),) if subset else ((3, 24, 16), (16, 512, 64), (128, 512, 64), (40, 256, 32))
    lengths = ((0, 5), (40, 1), (30, 3)) if subset else ((0, 300), (5000, 1), (700, 130), (63, 1))
    for heads, latent, rotary in sizes:
        for dtype in KERNEL_DTYPES:
            yield from _Case(machine, generator, dtype, heads, latent, rotary, lengths).checks()


@dataclass(frozen=True)
class _Case:
    machine: Machine
    generator: torch.Generator
    dtype: torch.dtype
    heads: int
    latent: int
    rotary: int
    lengths: tuple[tuple[int, int], ...]
    """Earlier tokens and new tokens of each sequence."""

    def checks(self) -> Iterator[Check]:
        """Compares attention with float64, and its bits with those of each sequence alone and in two chunks."""
        seed = self.generator.seed()
        name = f"latent attention {str(self.dtype).removeprefix('torch.')} {self.heads} heads of {self.rotary}"
        name = f"{name} + {self.latent}"
        width = self.rotary + self.latent
        rows = [self._random(past + new, self.heads + 1, width).to(self.dtype) for past, new in self.lengths]
        angles = [self._random(len(of_sequence), self.rotary // 2) * 3 for of_sequence in rows]
        chunks = list(range(len(rows)))
        together = self._run(rows, angles, [(s, *self.lengths[s]) for s in chunks])
        wrong = 0
        for s, found in zip(chunks, together, strict=True):
            expected, magnitude = self._expected(rows[s], angles[s], self.lengths[s][0])
            bound = 6 * _ROUNDING[self.dtype] * magnitude + 1e-6
            wrong += int((~((found.double() - expected).abs() <= bound)).sum())
        yield Check(name, wrong == 0, f"{wrong} wrong elements with seed {seed}")
        same = True
        for s, found in zip(chunks, together, strict=True):
            past, new = self.lengths[s]
            first = new // 3
            parts = [(s, past, first), (s, past + first, new - first)] if first else [(s, past, new)]
            alone = [self._run(rows, angles, [part])[0] for part in parts]
            same = same and torch.equal(torch.cat(alone), found)
        yield Check(f"{name}: bits alone and in chunks", same, f"seed {seed}")

    def _run(
        self, rows: list[torch.Tensor], angles: list[torch.Tensor], step: list[tuple[int, int, int]]
    ) -> list[torch.Tensor]:
        """Runs a step of (sequence, earlier tokens, new tokens). Only slots of earlier tokens are not NaN."""
        width = self.rotary + self.latent
        counts = [-(-(past + new) // _TOKENS_PER_BLOCK) for _, past, new in step]
        pool = self.machine.poisoned((sum(counts) + 1, _TOKENS_PER_BLOCK, width), self.dtype)
        tables = torch.full((len(step), max(counts)), -1, dtype=torch.int32)
        next_block = 1
        for i, ((s, past, _), count) in enumerate(zip(step, counts, strict=True)):
            tables[i, :count] = torch.arange(next_block, next_block + count)
            keys = _rotated(rows[s][:past, -1:].double(), angles[s][:past], self.dtype)[:, 0]
            pool.view(-1, width)[next_block * _TOKENS_PER_BLOCK :][:past] = keys.to(self.dtype)
            next_block += count
        qk = torch.cat([rows[s][past : past + new] for s, past, new in step]).contiguous()
        angle = torch.cat([angles[s][past : past + new] for s, past, new in step])
        cosine, sine = angle.cos().contiguous(), angle.sin().contiguous()
        offsets = torch.tensor([0, *(new for *_, new in step)]).cumsum(0)
        positions = torch.cat([torch.arange(past, past + new) for _, past, new in step])
        tables, offsets, positions = (
            integers.to(self.machine.device, torch.int32) for integers in (tables, offsets, positions)
        )
        attended = self.machine.poisoned((len(qk), self.heads, width), self.dtype)
        self.machine.kernels.enqueue_latent_attention(
            dtype=KERNEL_DTYPES[self.dtype].value,
            tokens=len(qk),
            sequences=len(step),
            max_blocks=tables.shape[1],
            tokens_per_block=_TOKENS_PER_BLOCK,
            num_heads=self.heads,
            key_dim=width,
            rotary_dim=self.rotary,
            scale=width**-0.5,
            qk=qk.data_ptr(),
            kv_pool=pool.data_ptr(),
            block_tables=tables.data_ptr(),
            sequence_offsets=offsets.data_ptr(),
            positions=positions.data_ptr(),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            attended=attended.data_ptr(),
            stream=self.machine.stream(),
        )
        self.machine.synchronize()
        return list(attended.split([new for *_, new in step]))

    def _expected(self, rows: torch.Tensor, angles: torch.Tensor, past: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the results in float64, and the sums of the weighted magnitudes of values."""
        heads = _rotated(rows.double(), angles, self.dtype)
        queries, keys = heads[past:, :-1], heads[:, -1]
        scores = torch.einsum("thd,kd->thk", queries, keys) * keys.shape[1] ** -0.5
        visible = (
            torch.arange(len(rows), device=rows.device) <= torch.arange(past, len(rows), device=rows.device)[:, None]
        )
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        return weights @ keys, weights @ keys.abs()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.machine.device, generator=self.generator)


def _rotated(heads: torch.Tensor, angles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rotates neighbours among the first elements of [tokens, heads, size], and rounds like the kernel."""
    half = angles.shape[1]
    cosine, sine = angles.cos().double()[:, None], angles.sin().double()[:, None]
    first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    turned = torch.stack([first * cosine - second * sine, second * cosine + first * sine], -1).flatten(-2)
    return torch.cat([turned.to(dtype).double(), heads[..., 2 * half :]], -1)

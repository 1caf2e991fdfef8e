"""Checks of adapters of lm_head and of the embedding: against float64, and single rows against batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from machine import KERNEL_DTYPES, Machine
from results import Check

from adaptrt._core import NUM_TABLE_MODULES, VOCABULARY_SLICE, lora_modules

DTYPES = (torch.float16, torch.bfloat16)
_IDS = {info.name: info.id for info in lora_modules()}
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Tensor cores may truncate where float32 addition would round.
_SUM_ROUNDING = 2.0**-22
_NO_ADDRESS = 0x10


def vocabulary_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Runs all checks, or a `subset` small enough for compute-sanitizer and the emulation."""
    generator = torch.Generator(machine.device)
    seed = generator.seed()
    for dtype in DTYPES:
        small, large = (200, (264, 72, 31)), (4096, (VOCABULARY_SLICE,) * 7 + (13568,))
        for width, slices in (small,) if subset else (small, large):
            for rows in (9,) if subset else (1, 9, 64, 200):
                case = _Case.random(machine, generator, dtype, "lm_head", [width] * len(slices), list(slices))
                yield from _logits(case, rows, seed)
        for width in (24,) if subset else (24, 4096):
            of_tokens = [VOCABULARY_SLICE, 40]
            case = _Case.random(machine, generator, dtype, "embedding", of_tokens, [width] * len(of_tokens))
            yield from _embedding(case, seed)
        for width in (24,) if subset else (24, 4096):
            yield from _new_tokens(machine, generator, dtype, width, seed)


@dataclass(frozen=True)
class _Update:
    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor
    shift: torch.Tensor


@dataclass(frozen=True)
class _Case:
    """Four adapters, and the tables in which the kernels find them. The third does not change the first slice."""

    machine: Machine
    generator: torch.Generator
    dtype: torch.dtype
    inputs: list[int]
    outputs: list[int]
    updates: list[list[_Update | None]]
    ranks: torch.Tensor
    pointers: torch.Tensor
    shifts: torch.Tensor

    @classmethod
    def random(
        cls,
        machine: Machine,
        generator: torch.Generator,
        dtype: torch.dtype,
        module: str,
        inputs: list[int],
        outputs: list[int],
    ) -> _Case:
        """inputs, outputs: of each slice."""
        ranks = torch.zeros(4, len(inputs), NUM_TABLE_MODULES, dtype=torch.int32)
        pointers = torch.full((*ranks.shape, 3), _NO_ADDRESS, dtype=torch.int64)
        shifts = torch.full(ranks.shape, _NO_ADDRESS, dtype=torch.int64)
        updates: list[list[_Update | None]] = []

        def values(*size: int) -> torch.Tensor:
            return torch.rand(size, generator=generator, device=machine.device) * 2 - 1

        for slot, rank in enumerate((8, 3, 16, 33)):
            updates.append([])
            for number, (width, out) in enumerate(zip(inputs, outputs, strict=True)):
                if (slot, number) == (2, 0):
                    updates[-1].append(None)
                    continue
                a, b = values(rank, width).to(dtype), values(out, rank).to(dtype)
                made = _Update(a, b, values(out) + 1.5, values(out))
                updates[-1].append(made)
                place = (slot, number, _IDS[module])
                ranks[place] = rank
                pointers[place] = torch.tensor([a.data_ptr(), b.data_ptr(), made.magnitude.data_ptr()])
                shifts[place] = made.shift.data_ptr()
        device = machine.device
        tables = (ranks.to(device), pointers.to(device), shifts.to(device))
        return cls(machine, generator, dtype, inputs, outputs, updates, *tables)

    def slots(self, count: int) -> torch.Tensor:
        """Returns adapters in no order, or -1."""
        return torch.randint(-1, 4, (count,), generator=self.generator, device=self.machine.device).to(torch.int32)


def _logits(case: _Case, rows: int, seed: int) -> Iterator[Check]:
    machine, dtype, width = case.machine, case.dtype, case.inputs[0]
    stride = sum(case.outputs) + 3
    kernel = machine.kernels.LoraKernel(
        KERNEL_DTYPES[dtype].value,
        0,
        [_IDS["lm_head"]] * len(case.outputs),
        case.outputs,
        40,
        True,
        entries=[number * NUM_TABLE_MODULES + _IDS["lm_head"] for number in range(len(case.outputs))],
        logits_stride=stride,
    )
    x = (torch.rand((rows, width), generator=case.generator, device=machine.device) * 2 - 1).to(dtype)
    base = torch.rand((rows, stride), generator=case.generator, device=machine.device)
    slots = case.slots(rows)

    def run(first: int, count: int) -> torch.Tensor:
        y = base[first : first + count].clone()
        offsets = torch.arange(count + 1, dtype=torch.int32, device=machine.device)
        workspace = machine.poisoned((kernel.workspace_bytes(count),), torch.uint8)
        inputs = (x[first:], y, offsets, slots[first:], case.ranks, case.pointers)
        kernel.enqueue(
            count,
            width,
            count,
            len(case.outputs),
            [tensor.data_ptr() for tensor in inputs],
            [y.data_ptr()],
            workspace.data_ptr(),
            machine.stream(),
            shifts=case.shifts.data_ptr(),
        )
        machine.synchronize()
        return y

    found = run(0, rows)
    expected, bound = base.double(), torch.zeros(base.shape, dtype=torch.float64, device=machine.device)
    start = 0
    for number, out in enumerate(case.outputs):
        columns = slice(start, start + out)
        start += out
        for slot, updates in enumerate(case.updates):
            update, of_slot = updates[number], slots == slot
            if update is None:
                continue
            before, b, magnitude = expected[of_slot, columns], update.b.double(), update.magnitude.double()
            shrunk = (x[of_slot].double() @ update.a.double().T).float().to(dtype).double()
            sizes = x[of_slot].double().abs() @ update.a.double().abs().T
            errors = (width + 2) * _SUM_ROUNDING * sizes + 2 * _ROUNDING[dtype] * shrunk.abs()
            terms = before.abs() + shrunk.abs() @ b.abs().T
            expected[of_slot, columns] = (before + shrunk @ b.T) * magnitude + update.shift.double()
            bound[of_slot, columns] = (errors @ b.abs().T + 64 * _SUM_ROUNDING * terms) * magnitude + 1e-6
    wrong = int((~((found.double() - expected).abs() <= bound)).sum())
    name = f"vocabulary logits {str(dtype).removeprefix('torch.')} {rows} x {sum(case.outputs)}"
    yield Check(name, wrong == 0, f"{wrong} wrong elements with seed {seed}")
    alone = torch.cat([run(row, 1) for row in range(rows)])
    yield Check(f"{name}: bits of a row alone", torch.equal(alone, found), f"seed {seed}")


def _embedding(case: _Case, seed: int) -> Iterator[Check]:
    machine, dtype, width = case.machine, case.dtype, case.outputs[0]
    vocabulary = sum(case.inputs)
    table = (torch.rand((vocabulary, width), generator=case.generator, device=machine.device) * 2 - 1).to(dtype)
    ids = torch.randint(0, vocabulary, (30,), generator=case.generator, device=machine.device).to(torch.int32)
    ids[:3] = torch.tensor([VOCABULARY_SLICE - 1, VOCABULARY_SLICE, vocabulary - 1])
    slots = case.slots(len(ids))
    scale = 1.5

    def run(first: int, count: int) -> torch.Tensor:
        output = table[ids[first : first + count].long()].float() * scale
        machine.kernels.enqueue_adapted_embedding(
            dtype=KERNEL_DTYPES[dtype].value,
            tokens=count,
            width=width,
            table=table.data_ptr(),
            token_ids=ids[first:].data_ptr(),
            scale=scale,
            output=output.data_ptr(),
            vocabulary=vocabulary,
            layers=len(case.inputs),
            max_rank=40,
            dora=True,
            adapter_slots=slots[first:].data_ptr(),
            ranks=case.ranks.data_ptr(),
            pointers=case.pointers.data_ptr(),
            shifts=case.shifts.data_ptr(),
            stream=machine.stream(),
        )
        machine.synchronize()
        return output

    found = run(0, len(ids))
    rows = []
    for token, slot in zip(ids.tolist(), slots.tolist(), strict=True):
        number, place = divmod(token, VOCABULARY_SLICE)
        update = None if slot < 0 else case.updates[slot][number]
        row = table[token].double()
        if update is not None:
            row = row + update.b.double() @ update.a[:, place].double()
            row = row * update.magnitude.double() + update.shift.double()
        rows.append(row * scale)
    distance = float((found.double() - torch.stack(rows)).abs().max())
    name = f"vocabulary embedding {str(dtype).removeprefix('torch.')} {width}"
    yield Check(name, distance <= 1e-4, f"distance {distance} with seed {seed}")
    alone = torch.cat([run(token, 1) for token in range(len(ids))])
    yield Check(f"{name}: bits of a token alone", torch.equal(alone, found), f"seed {seed}")


def _new_tokens(
    machine: Machine, generator: torch.Generator, dtype: torch.dtype, width: int, seed: int
) -> Iterator[Check]:
    """Checks logits and embeddings of the tokens that two adapters add, at an entry behind a layer's modules."""
    vocabulary, most, counts, entry = 37, 13, (2, 11), NUM_TABLE_MODULES + 3
    slot_entries, scale, softcap = 2 * NUM_TABLE_MODULES, 0.5, 30.0

    def values(*size: int) -> torch.Tensor:
        return (torch.rand(size, generator=generator, device=machine.device) * 2 - 1).to(dtype)

    outputs, inputs = [values(count, width) for count in counts], [values(width, count) for count in counts]
    ranks = torch.zeros(2, slot_entries, dtype=torch.int32, device=machine.device)
    pointers = torch.full((2, slot_entries, 3), _NO_ADDRESS, dtype=torch.int64, device=machine.device)
    for slot, count in enumerate(counts):
        ranks[slot, entry] = count
        pointers[slot, entry, 0], pointers[slot, entry, 1] = outputs[slot].data_ptr(), inputs[slot].data_ptr()
    slots = torch.tensor([1, -1, 0, 1, 0, 1, -1], dtype=torch.int32, device=machine.device)
    x = values(len(slots), width)

    def logits(first: int, rows: int) -> torch.Tensor:
        found = torch.full((rows, vocabulary + most), 7.0, device=machine.device)
        machine.kernels.enqueue_new_token_logits(
            dtype=KERNEL_DTYPES[dtype].value,
            rows=rows,
            width=width,
            vocabulary=vocabulary,
            max_tokens=most,
            entry=entry,
            slot_entries=slot_entries,
            x=x[first:].data_ptr(),
            adapter_slots=slots[first:].data_ptr(),
            ranks=ranks.data_ptr(),
            pointers=pointers.data_ptr(),
            scale=scale,
            softcap=softcap,
            logits=found.data_ptr(),
            stream=machine.stream(),
        )
        machine.synchronize()
        return found

    found = logits(0, len(slots))
    expected = torch.full_like(found, 7.0).double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            sums = outputs[slot].double() @ x[row].double() * scale
            expected[row, vocabulary : vocabulary + counts[slot]] = softcap * torch.tanh(sums / softcap)
    distance = float((found.double() - expected).abs().max())
    name = f"vocabulary new tokens {str(dtype).removeprefix('torch.')} {width}"
    yield Check(f"{name}: logits", distance <= 1e-4, f"distance {distance} with seed {seed}")
    alone = torch.cat([logits(row, 1) for row in range(len(slots))])
    yield Check(f"{name}: bits of a row alone", torch.equal(alone, found), f"seed {seed}")
    table, output = values(vocabulary, width), torch.full((len(slots), width), 7.0, device=machine.device)
    numbers = [vocabulary + 10, 3, vocabulary, 5, vocabulary + 1, vocabulary + 3, 0]
    ids = torch.tensor(numbers, dtype=torch.int32, device=machine.device)
    machine.kernels.enqueue_adapted_embedding(
        dtype=KERNEL_DTYPES[dtype].value,
        tokens=len(slots),
        width=width,
        table=table.data_ptr(),
        token_ids=ids.data_ptr(),
        scale=scale,
        output=output.data_ptr(),
        vocabulary=vocabulary,
        layers=2,
        new_tokens_entry=entry,
        max_rank=1,
        dora=False,
        adapter_slots=slots.data_ptr(),
        ranks=ranks.data_ptr(),
        pointers=pointers.data_ptr(),
        shifts=0,
        stream=machine.stream(),
    )
    machine.synchronize()
    rows = torch.full_like(output, 7.0)
    for row, (token, slot) in enumerate(zip(numbers, slots.tolist(), strict=True)):
        if token >= vocabulary:
            rows[row] = inputs[slot][:, token - vocabulary].float() * scale
    yield Check(f"{name}: embeddings", torch.equal(output, rows), f"seed {seed}")

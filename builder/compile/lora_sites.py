"""Adapter sites of a program: where adapters act on a network's ops, and the sites' numbers."""

from __future__ import annotations

from typing import Final

from ..._core import lora_modules
from ...formats.engine.plan import LoraPart, LoraSite
from ...formats.network.adapter_sites import NEW_TOKENS, module_id, sites_of
from ...formats.network.network import Network
from ...formats.network.ops import Op

_NEW_TOKENS: Final = next(info.id for info in lora_modules() if info.name == NEW_TOKENS)


class SiteNumbers:
    """Numbers the sites of a program's ops, one after another."""

    def __init__(self, first_site: int, *, lora: bool, fully_sharded: bool) -> None:
        """first_site: number of the first site.
        lora: False: there are no sites.
        fully_sharded: see lora_sites().
        """
        self._next = first_site
        self._lora = lora
        self._fully_sharded = fully_sharded

    def of(self, op: Op) -> tuple[int, tuple[LoraSite, ...]]:
        """The sites of an op and the number of the first; -1 and an empty tuple if adapters do not act on it."""
        sites: tuple[LoraSite, ...] = ()
        if self._lora:
            sites = lora_sites(op, fully_sharded=self._fully_sharded)
        first = self._next
        self._next += len(sites)
        return (first, sites) if sites else (-1, ())


def lora_sites(op: Op, *, fully_sharded: bool) -> tuple[LoraSite, ...]:
    """Sites where adapters act on an op.

    fully_sharded: tensor-parallel ranks split both adapter matrices of each layer that they split.
    """
    return tuple(
        LoraSite(
            layer=site.layer,
            in_size=site.in_size,
            parts=tuple(
                LoraPart(
                    module=module_id(part),
                    out_size=site.outputs_of(part),
                    first_output=part.shares[0].start if len(part.shares) == 1 else 0,
                    num_remote_outputs=part.num_remote_outputs,
                    output_ranges=_flat(part.shares) if len(part.shares) > 1 else (),
                )
                for part in site.parts
            ),
            expert=site.expert,
            first_input=site.weights[0].first_input,
            num_remote_inputs=site.weights[0].num_remote_inputs,
            adds_shifts=site.weights[0].is_first_term,
            experts_for_each=site.experts_for_each,
            num_shares=site.weights[0].num_shares if fully_sharded else 1,
            share=site.weights[0].share if fully_sharded else 0,
        )
        for site in sites_of(op)
    )


def _flat(ranges: tuple[range, ...]) -> tuple[int, ...]:
    """Start and length of each range."""
    return tuple(number for one in ranges for number in (one.start, len(one)))


def new_token_sites(network: Network, max_extra_tokens: int) -> tuple[LoraSite, ...]:
    """Sites of the rows that adapters add for tokens beyond the vocabulary: in lm_head and in the embedding."""
    if max_extra_tokens == 0:
        return ()
    size = network.config.hidden_size
    part = LoraPart(module=_NEW_TOKENS, out_size=size, first_output=0, num_remote_outputs=0)
    site = LoraSite(
        layer=0, in_size=size, parts=(part,), expert=0, first_input=0, num_remote_inputs=0, adds_shifts=True
    )
    return (site,)

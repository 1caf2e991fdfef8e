"""The compiler of the backends native and cuda: compiles a network to an engine file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from ..._core import ConfigError
from ...formats.checkpoint.rank_tensors import RankTensors
from ...formats.engine.build_config import CUDA, DISABLE, BuildConfig
from ...formats.engine.engine_file import EngineTensor, write_engine_file
from ...formats.engine.plan import LinearOp, LoraSite, Matrix, Program
from ...formats.network.network import Network
from ...formats.network.ops import Rotary
from ..network.rank_network import network_of_rank
from .arena import Arena
from .assemble import assemble
from .compression import places_for_outliers
from .emit import emit
from .lora_sites import lora_sites, new_token_sites
from .pack import engine_tensors
from .storage import PANELS, ROWS, Storage


@dataclass(frozen=True)
class CompiledNetwork:
    """A program and its tensors before packing."""

    program: Program
    arena: Arena
    tensors: list[EngineTensor]

    @property
    def num_bytes(self) -> int:
        """Size of the packed tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def linear_matrices(self) -> list[Matrix]:
        """Matrices of linear layers."""
        return [part.weight for op in self.program.ops if isinstance(op, LinearOp) for part in op.parts]

    @property
    def num_sparse_layers(self) -> int:
        """Number of linear layers whose weights are read partially for small batches: ReLU-gated, or with a ReLU's
        output as input."""
        layers = [op for op in self.program.ops if isinstance(op, LinearOp)]
        return sum(
            op.has_sparse_input or op.neurons is not None or any(part.weight.is_stored_twice for part in op.parts)
            for op in layers
        )

    @property
    def predicted_layers(self) -> list[LinearOp]:
        """Linear layers whose gates are predicted."""
        return [op for op in self.program.ops if isinstance(op, LinearOp) and op.scores is not None]

    @property
    def num_ops(self) -> int:
        """Ops of the program."""
        return len(self.program.ops)

    def write(self, path: Path, advance: Callable[[int], None]) -> str:
        """Packs the weights into an engine file. Returns the checksum for config.json."""
        return write_engine_file(path, self.program, self.tensors, advance)


def compile_network(network: Network, tensors: RankTensors, config: BuildConfig, rank: int = 0) -> CompiledNetwork:
    """Compiles the program of a rank and plans its buffers. `network` is the whole model's, `tensors` the rank's.

    config: complete, see BuildConfig.with_defaults(). With a weight_memory, sparse ReLU-gated MLPs are also stored
    neuron by neuron, to be streamed from the file that way. For backend cuda, nothing is stored twice, and the network
    is one that cuda_support.problems_of_network() has no problem with.

    Raises ConfigError if adapters may divide rotary positions but the network's layers use several rotations.
    """
    checkpoint, lora = network.config, config.accepted_adapters
    storage = ROWS if config.backend == CUDA else PANELS
    compression = partial(places_for_outliers, tensors) if config.compress_weights else None
    if lora is not None and lora.long_lora_scaling_factors:
        _require_one_rotation(network)
    fully_sharded = lora is not None and lora.fully_sharded_loras
    sites = _sites_of_stages(network, rank, storage, fully_sharded=fully_sharded) if lora is not None else []
    max_extra_tokens = 0 if lora is None else lora.max_extra_tokens
    stage = rank // checkpoint.mapping.tp_size
    emitted = emit(
        network_of_rank(network, rank),
        storage,
        lora=lora is not None,
        fully_sharded=fully_sharded,
        first_site=sum(map(len, sites[:stage])),
        compression=compression,
        sparse_mlp=config.sparse_mlp != DISABLE and not config.compress_weights,
        neurons=config.weight_memory is not None,
        max_extra_tokens=max_extra_tokens,
    )
    program, arena = assemble(
        replace(emitted, sites=(*chain.from_iterable(sites), *new_token_sites(network, max_extra_tokens))),
        checkpoint,
        config,
        rank,
        storage,
    )
    return CompiledNetwork(program, arena, engine_tensors(emitted.weights, tensors, checkpoint.dtype, storage))


def _require_one_rotation(network: Network) -> None:
    """Raises ConfigError for several rotations: an adapter's config does not say which of them it was trained with."""
    found = {(op.size, op.base) for op in network.ops if isinstance(op, Rotary) and op.base != 0.0}
    if len(found) > 1:
        raise ConfigError(
            "long_lora_scaling_factors need a model whose layers share one rotary base; "
            f"{network.config.architecture} has the bases {', '.join(f'{base:g}' for _, base in sorted(found))}"
        )


def _sites_of_stages(network: Network, rank: int, storage: Storage, *, fully_sharded: bool) -> list[list[LoraSite]]:
    """Sites of a rank, and of the ranks of other stages that have the same tensor-parallel share. Every rank knows them
    all, so that all ranks agree on an adapter's page count."""
    mapping = network.config.mapping
    ranks = range(rank % mapping.tp_size, mapping.world_size, mapping.tp_size)
    return [
        [site for op in network_of_rank(network, each).ops for site in lora_sites(op, fully_sharded=fully_sharded)]
        for each in ranks
    ]

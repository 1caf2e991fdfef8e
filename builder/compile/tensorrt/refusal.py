"""Networks that have no TensorRT plans, and errors of TensorRT, in its own words and with the names of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ....formats.engine.build_config import NATIVE
from ....formats.network.network import Network
from ....formats.network.ops import (
    Attention,
    CausalConvolution,
    GatedColumns,
    GatedConvolution,
    GatedDelta,
    GatedRmsNorm,
    LatentQueries,
    LatentValues,
    Op,
    RmsNorm,
    Scale,
    SelectiveScan,
    SigmoidGate,
    SiluGate,
    Xielu,
)
from ...network.without_nodes import FIELDS, OPS, names_of_fields, names_of_ops
from .log import Log, nodes_named

if TYPE_CHECKING:
    from ....plugins.tensorrt import Registration

_OPS: Final = (
    *OPS,
    CausalConvolution,
    GatedColumns,
    GatedConvolution,
    GatedDelta,
    GatedRmsNorm,
    LatentQueries,
    LatentValues,
    Scale,
    SelectiveScan,
    SigmoidGate,
    SiluGate,
    Xielu,
)
"""Ops that graphs do not have, whose nodes have not run in a plan, or that need memory which plans do not have."""

_FIELDS: Final[Mapping[type[Op], tuple[str, ...]]] = {
    **FIELDS,
    Attention: (*FIELDS[Attention], "normalizes_values", "values_from_keys", "shared_layer"),
    RmsNorm: ("is_stream", "sum_scale"),
}

_FOLLOW_UP: Final = "[checkMacros.cpp::catchCudaError"


def problems_of_network(network: Network) -> list[str]:
    """Lists the ops, and the fields of others, that plans do not have."""
    names = names_of_ops(network, _OPS) | names_of_fields(network, _FIELDS)
    if not names:
        return []
    return [f"{network.config.architecture} has {', '.join(sorted(names))}, which need backend {NATIVE}"]


class PlanRefusedError(Exception):
    """TensorRT does not build the network."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        """Each has the name of the network's node, if TensorRT or the plugin knows it, and TensorRT's message."""


class Refusal:
    """Makes errors from the messages of TensorRT and of the plugins."""

    def __init__(self, log: Log, registration: Registration, operators: Mapping[str, str]) -> None:
        """`operators` are the operators of the network's nodes, by node name."""
        self._log = log
        self._registration = registration
        self._operators = operators

    def parser_error(self, parser: Any) -> PlanRefusedError:
        """The error of a parser that failed."""
        problems = self._registration.take_problems()
        for index in range(parser.num_errors):
            error = parser.get_error(index)
            text = f"{_one_line(error.desc())} [{error.code().name}]"
            name, operator = error.node_name(), error.node_operator()
            problems.append(f"node {name} ({operator}): {text}" if name else text)
        return PlanRefusedError(problems or ["TensorRT cannot parse the network", *self._logged()])

    def error(self, summary: str) -> PlanRefusedError:
        """Any other error; `summary` says what failed."""
        return PlanRefusedError([summary, *self._registration.take_problems(), *self._logged()])

    def _logged(self) -> list[str]:
        problems = []
        for text in _without_follow_ups(self._log.errors):
            named = nodes_named(text, self._operators)
            nodes = ", ".join(f"{name} ({self._operators[name]})" for name in named)
            problems.append(f"node {nodes}: {_one_line(text)}" if nodes else _one_line(text))
        if problems and not any(problem.startswith("node ") for problem in problems):
            last = self._log.last_node(self._operators)
            if last is not None:
                problems.append(f"the last node that it mentioned is {last} ({self._operators[last]})")
        return problems


def _one_line(text: str) -> str:
    return " ".join(" ".join(_without_follow_ups(text.splitlines())).split())


def _without_follow_ups(errors: Sequence[str]) -> Sequence[str]:
    """Drops the errors that TensorRT adds after every error without a GPU driver, unless there are no others."""
    own = [text for text in errors if not text.startswith(_FOLLOW_UP)]
    return own or errors

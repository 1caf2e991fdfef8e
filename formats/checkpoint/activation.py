"""Activations of MLPs, by the names that a checkpoint's `hidden_act` has."""

from __future__ import annotations

from enum import Enum


class Activation(Enum):
    """Functions between the linear layers of an MLP."""

    SILU = "silu"
    GELU = "gelu"
    """x Phi(x), with the normal distribution's Phi."""
    GELU_TANH = "gelu_tanh"
    """GELU's approximation by tanh."""
    RELU = "relu"
    RELU_BOTH = "relu_both"
    """For gated layers: relu(gate) * relu(up)."""
    RELU_SQUARED = "relu_squared"
    """relu(x)^2, for layers without a gate."""
    XIELU = "xielu"
    """For layers without a gate; the model has its parameters."""
    QUICK_GELU = "quick_gelu"
    """x sigmoid(1.702 x), for vision towers; made of ops without an activation of their own."""
    CLAMPED_SILU = "clamped_silu"
    """For gated layers: g sigmoid(1.702 g) * (u + 1), with the gate g at most 7 and u clamped to -7 .. 7."""

    @property
    def leaves_zeros(self) -> bool:
        """True if the output is zero for about half of all inputs or more."""
        return self in (Activation.RELU, Activation.RELU_BOTH)


HIDDEN_ACTS = tuple(activation.value for activation in Activation if activation is not Activation.CLAMPED_SILU)
"""Values of `hidden_act`; a family whose experts have another activation says so itself."""

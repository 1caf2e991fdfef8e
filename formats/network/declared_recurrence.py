"""Declaration of linear attention: a causal convolution, the gated delta rule, and gates."""

from __future__ import annotations

from .declared_attention import DeclaredAttention
from .operands import DeltaShape, Value
from .ops import CausalConvolution, GatedDelta, GatedRmsNorm, SigmoidGate
from .weights import Tensor


class DeclaredRecurrence(DeclaredAttention):
    """Methods of a network that declare layers with a state per sequence, and gates of attention."""

    def causal_convolution(self, x: Value, source: str, name: str, *, width: int, taps: int) -> Value:
        """Declares `x` with its first `width` columns replaced by silu(their convolution over `taps` tokens).

        Column c is convolved with row c of `source`.weight [width, 1, taps].
        """
        assert self._layer is not None
        output = self._value("convolved", x.width, x.rows)
        weight = Tensor(self._name(f"{name}.weight"), f"{source}.weight", (width, 1, taps))
        self.ops.append(
            CausalConvolution(
                scope=self._scope, layer=self._layer, input=self._overwrite(x), output=output, weight=weight
            )
        )
        return output

    def gated_delta(self, qkv: Value, gates: Value, shape: DeltaShape, source: str, name: str) -> Value:
        """Declares the gated delta rule over the columns [q | k | v] of `qkv` and [b | a] of `gates`.

        The decay has `source`.A_log and `source`.dt_bias, each [value heads].
        """
        assert self._layer is not None
        output = self._value("attended", shape.value_size, qkv.rows)
        heads = (shape.num_value_heads,)
        self.ops.append(
            GatedDelta(
                scope=self._scope,
                layer=self._layer,
                qkv=self._read(qkv),
                gates=self._overwrite(gates),
                output=output,
                shape=shape,
                log_decay=Tensor(self._name(f"{name}.A_log"), f"{source}.A_log", heads, float32=True),
                time_bias=Tensor(self._name(f"{name}.dt_bias"), f"{source}.dt_bias", heads, float32=True),
            )
        )
        return output

    def gated_rms_norm(self, x: Value, gate: Value, source: str, name: str, *, head_size: int) -> Value:
        """Declares an RMS norm of each head of `x`, times the silu of the last columns of `gate`."""
        output = self._value("normed", x.width, x.rows)
        self.ops.append(
            GatedRmsNorm(
                scope=self._scope,
                input=self._read(x),
                gate=self._read(gate),
                output=output,
                weight=self._vector(source, f"{name}.weight", head_size),
                epsilon=self.config.norm_epsilon,
            )
        )
        return output

    def sigmoid_gate(self, x: Value, gate: Value) -> Value:
        """Declares `x` times the sigmoid of the last columns of `gate`."""
        output = self._value("gated", x.width, x.rows)
        self.ops.append(SigmoidGate(scope=self._scope, input=self._overwrite(x), gate=self._read(gate), output=output))
        return output

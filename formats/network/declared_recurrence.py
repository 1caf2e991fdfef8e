"""Declaration of linear attention: causal convolutions, the gated delta rule, and gates."""

from __future__ import annotations

from .declared_attention import DeclaredAttention
from .operands import DeltaShape, ScanShape, Value
from .ops import (
    CausalConvolution,
    GatedConvolution,
    GatedDelta,
    GatedRmsNorm,
    SelectiveScan,
    SigmoidGate,
    SiluGate,
    Xielu,
)
from .weights import Tensor


class DeclaredRecurrence(DeclaredAttention):
    """Methods of a network that declare layers with a state per sequence, and gates of attention."""

    def causal_convolution(
        self, x: Value, source: str, name: str, *, width: int, taps: int, bias: bool = False
    ) -> Value:
        """Declares `x` with its first `width` columns replaced by silu(their convolution over `taps` tokens).

        Column c is convolved with row c of `source`.weight [width, 1, taps], and has the bias `source`.bias[c].
        """
        assert self._layer is not None
        output = self._value("convolved", x.width, x.rows)
        weight = Tensor(self._name(f"{name}.weight"), f"{source}.weight", (width, 1, taps))
        self.ops.append(
            CausalConvolution(
                scope=self._scope,
                layer=self._layer,
                input=self._overwrite(x),
                output=output,
                weight=weight,
                bias=self._vector(source, f"{name}.bias", width) if bias else None,
            )
        )
        return output

    def gated_convolution(self, x: Value, source: str, name: str, *, taps: int, bias: bool) -> Value:
        """Declares the convolution over `taps` tokens between two gates; `x` is [b | c | x].

        Column c is convolved with row c of `source`.weight [columns, 1, taps], and has the bias `source`.bias[c].
        """
        assert self._layer is not None
        width = x.width // 3
        output = self._value("convolved", width, x.rows)
        self.ops.append(
            GatedConvolution(
                scope=self._scope,
                layer=self._layer,
                input=self._read(x),
                output=output,
                weight=Tensor(self._name(f"{name}.weight"), f"{source}.weight", (width, 1, taps)),
                bias=self._vector(source, f"{name}.bias", width) if bias else None,
            )
        )
        return output

    def gated_delta(
        self, qkv: Value, gates: Value, shape: DeltaShape, source: str, name: str, *, update_scale: float = 1.0
    ) -> Value:
        """Declares the gated delta rule over the columns [q | k | v] of `qkv` and [b | a] of `gates`.

        The decay has `source`.A_log and `source`.dt_bias, each [value heads]. sigmoid(b) is multiplied by
        `update_scale`.
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
                update_scale=update_scale,
            )
        )
        return output

    def selective_scan(
        self, values: Value, shape: ScanShape, source: str, name: str, *, time_limits: tuple[float, float]
    ) -> Value:
        """Declares Mamba 2's scan over the columns [x | B | C | dt] of `values`.

        Vectors are `source`.A_log, `source`.dt_bias and `source`.D, each [heads].
        """
        assert self._layer is not None
        output = self._value("scanned", shape.value_size, values.rows)

        def vector(kind: str) -> Tensor:
            return Tensor(self._name(f"{name}.{kind}"), f"{source}.{kind}", (shape.num_heads,), float32=True)

        self.ops.append(
            SelectiveScan(
                scope=self._scope,
                layer=self._layer,
                values=self._read(values),
                output=output,
                shape=shape,
                log_decay=vector("A_log"),
                time_bias=vector("dt_bias"),
                skip=vector("D"),
                time_min=time_limits[0],
                time_max=time_limits[1],
            )
        )
        return output

    def xielu(self, x: Value, source: str, name: str) -> Value:
        """Declares xIELU(x) with the parameters `source` [4]."""
        output = self._value("activated", x.width, x.rows)
        parameters = Tensor(self._name(name), source, (4,), float32=True)
        self.ops.append(Xielu(scope=self._scope, input=self._read(x), output=output, parameters=parameters))
        return output

    def gated_rms_norm(
        self,
        x: Value,
        gate: Value,
        source: str,
        name: str,
        *,
        head_size: int,
        epsilon: float | None = None,
        gate_first: bool = False,
        num_groups: int = 1,
    ) -> Value:
        """Declares an RMS norm of each of `num_groups` groups of each head of `x`, times silu(gate).

        gate: its last columns count.
        epsilon: the default comes from the config.
        gate_first: True multiplies `x` by silu(gate) before its norm.
        """
        output = self._value("normed", x.width, x.rows)
        self.ops.append(
            GatedRmsNorm(
                scope=self._scope,
                input=self._read(x),
                gate=self._read(gate),
                output=output,
                weight=self._vector(source, f"{name}.weight", head_size),
                epsilon=self.config.norm_epsilon if epsilon is None else epsilon,
                gate_first=gate_first,
                num_groups=num_groups,
            )
        )
        return output

    def sigmoid_gate(self, x: Value, gate: Value) -> Value:
        """Declares `x` times the sigmoid of the last columns of `gate`."""
        output = self._value("gated", x.width, x.rows)
        self.ops.append(SigmoidGate(scope=self._scope, input=self._overwrite(x), gate=self._read(gate), output=output))
        return output

    def silu_gate(self, x: Value, gate: Value) -> Value:
        """Declares `x` times the silu of the last columns of `gate`; both are float32."""
        output = self._value("gated", x.width, x.rows)
        self.ops.append(SiluGate(scope=self._scope, input=self._read(x), gate=self._read(gate), output=output))
        return output

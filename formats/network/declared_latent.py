"""Declaration of latent attention: queries and keys for attention to compressed rows, and values of the result."""

from __future__ import annotations

from collections.abc import Sequence

from .declared_recurrence import DeclaredRecurrence
from .operands import LatentShape, Value
from .ops import LatentQueries, LatentValues
from .weights import LinearWeight


class DeclaredLatent(DeclaredRecurrence):
    """Methods of a network that declare what comes before and after an attention to compressed rows."""

    def latent_queries(
        self,
        queries: Value,
        rows: Value,
        shape: LatentShape,
        keys: Sequence[LinearWeight],
        source: str,
        name: str,
        *,
        epsilon: float,
    ) -> Value:
        """Declares [q | k] for attention() with shape.attention.

        queries: [plain | rotated] of each head.
        rows: [compressed row | rotated]; `source`.weight [latent_dim] is the norm of compressed rows.
        keys: weight [latent_dim, plain_dim] of each head.
        """
        assert self._layer is not None
        output = self._value("qk", (shape.num_heads + 1) * shape.key_dim, queries.rows)
        self.ops.append(
            LatentQueries(
                scope=self._scope,
                layer=self._layer,
                queries=self._read(queries),
                rows=self._read(rows),
                output=output,
                shape=shape,
                norm=self._vector(source, f"{name}.weight", shape.latent_dim),
                epsilon=epsilon,
                keys=tuple(keys),
            )
        )
        return output

    def latent_values(self, x: Value, shape: LatentShape, values: Sequence[LinearWeight]) -> Value:
        """Declares the values [num_heads value_dim] of what attention() returned.

        values: weight [value_dim, latent_dim] of each head.
        """
        assert self._layer is not None
        output = self._value("values", shape.num_heads * shape.value_dim, x.rows)
        self.ops.append(
            LatentValues(
                scope=self._scope,
                layer=self._layer,
                input=self._read(x),
                output=output,
                shape=shape,
                values=tuple(values),
            )
        )
        return output

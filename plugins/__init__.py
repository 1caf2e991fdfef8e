"""Plugin nodes of an ONNX graph. Each is defined once: schema, shapes, reference implementation."""

from .definition import DOMAIN, NAMESPACE, VERSION, Attribute, Dim, Plugin, Tensor
from .dora import DORA
from .lora import LORA
from .paged_attention import PAGED_ATTENTION
from .reference import reference_ops
from .schema import register_schemas

PLUGINS: tuple[Plugin, ...] = (LORA, DORA, PAGED_ATTENTION)
"""All plugins."""

__all__ = [
    "DOMAIN",
    "DORA",
    "LORA",
    "NAMESPACE",
    "PAGED_ATTENTION",
    "PLUGINS",
    "VERSION",
    "Attribute",
    "Dim",
    "Plugin",
    "Tensor",
    "reference_ops",
    "register_schemas",
]

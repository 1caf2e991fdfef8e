"""The plugins as TensorRT sees them: creators and nodes derived from the definitions.

Nothing here imports TensorRT: the module, `tensorrt` or `tensorrt_rtx`, is the caller's.
"""

from .registration import Registration, register_plugins

__all__ = ["Registration", "register_plugins"]

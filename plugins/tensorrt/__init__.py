"""Plugins for TensorRT: creators and nodes derived from the definitions.

This package does not import TensorRT: the caller passes the module, `tensorrt` or `tensorrt_rtx`.
"""

from .registration import Registration, register_plugins

__all__ = ["Registration", "register_plugins"]

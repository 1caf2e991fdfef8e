"""TensorRT-LLM's configurations as Python classes, whose fields are checked when they are set.

Executors reject most of them.
"""

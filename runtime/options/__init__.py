"""TensorRT-LLM's configurations that are values in Python, checked when they are set.

Most are of what an executor here refuses.
"""

"""Runs the plans of engines that TensorRT compiled.

TensorRT and adaptrt._cuda are imported only when an executor starts such an engine.
"""

"""The TensorRT compiler: from the network's ONNX graph to one plan for each compute capability.

TensorRT itself is only ever imported in child processes (child.py), since some of its failures end the process.
"""

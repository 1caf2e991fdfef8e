"""The network as an ONNX graph: layers that emit standard nodes and plugin nodes, one layer a file."""

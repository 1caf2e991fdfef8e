"""The native compiler: lowers the network's ONNX graph to a program, packs the weights, writes the engine."""

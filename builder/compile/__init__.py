"""The native compiler: lowers a network to a program, packs the weights and writes the engine."""

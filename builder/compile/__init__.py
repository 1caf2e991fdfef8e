"""The native compiler: makes a program of a network, packs the weights, writes the engine."""

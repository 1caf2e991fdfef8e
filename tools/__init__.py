"""Command-line tools: adapter conversion, DoRA normalisation, inspection, benchmarks and the demo."""

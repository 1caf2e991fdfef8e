"""Models that were published with quantised layers: which layers are kept quantised, and which are dequantised."""

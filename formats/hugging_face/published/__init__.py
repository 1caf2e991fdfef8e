"""Quantisation formats of published models, one file per method."""

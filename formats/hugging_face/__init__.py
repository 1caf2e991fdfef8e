"""Hugging Face model directories: their config.json, and the quantisation of their layers."""

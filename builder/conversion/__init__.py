"""Converts Hugging Face model directories to checkpoints, and quantises checkpoints."""

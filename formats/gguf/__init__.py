"""GGUF files, the format of llama.cpp: their header, their tensors as float32, and their models as directories."""

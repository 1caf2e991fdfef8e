"""TensorRT-LLM style checkpoints: config, files, and how they are made from Hugging Face models."""

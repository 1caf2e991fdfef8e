"""TensorRT-LLM style checkpoints: config, tensors, files; and the tensors of Hugging Face models."""

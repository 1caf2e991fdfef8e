"""TensorRT-LLM's configurations of what an executor here may not do yet: values, checked when they are set."""

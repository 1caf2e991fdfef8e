"""Engine directories with TensorRT plans: the plans, their GPUs and their package."""

"""Engine directories with TensorRT plans: the plans, the GPUs and the package that they are for."""

"""Tensor work of a step: the model runner, sampling, CUDA graphs and host-device copies."""

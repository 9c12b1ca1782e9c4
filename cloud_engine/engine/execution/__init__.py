"""Everything that touches tensors: the model runner, sampling, CUDA graphs, copies between host and device."""

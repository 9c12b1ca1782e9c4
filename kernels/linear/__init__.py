"""Linear layers: packed weights on CPUs, quantized weights on GPUs."""

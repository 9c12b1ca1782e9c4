"""Linear layers with packed weights on CPUs and with quantised weights on GPUs."""

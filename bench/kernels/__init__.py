"""`updraft bench kernels`: each kernel beside what the device allows."""

"""`updraft bench kernels`: each kernel compared with the limits of the device."""

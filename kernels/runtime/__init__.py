"""The runtime of the kernels: the choice of an implementation, native libraries, launches, threads and memory."""

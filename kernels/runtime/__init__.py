"""What kernels run on: the choice of an implementation, native libraries, launches, threads and memory."""

"""Kernel runtime: choice of the implementation, native libraries, launches, threads and memory."""

"""`make gpu`: all tests and measurements that need a CUDA device."""

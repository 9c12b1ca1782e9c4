"""llama.cpp: its build, library bindings, contexts, and Updraft's kernels in it."""

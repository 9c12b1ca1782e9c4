"""Engine runtime: the thread, the scheduler, the prefix cache, and answers in progress."""

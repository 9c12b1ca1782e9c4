"""Learning from judged answers, which are collected without delaying requests."""

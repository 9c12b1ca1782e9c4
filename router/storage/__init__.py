"""Stores of answers, files and batches, which the user can turn on."""

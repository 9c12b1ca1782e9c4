"""Licences to answer a task on the device: tests by betting on sampled answers, and their revocation."""

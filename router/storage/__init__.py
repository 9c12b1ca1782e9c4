"""Stores of requests and answers, where the user asks for them."""

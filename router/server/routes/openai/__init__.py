"""Endpoints of OpenAI's API."""

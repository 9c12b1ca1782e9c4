"""Requests as engines read them, from the bytes of a body."""

from __future__ import annotations

from updraft.protocol.decoding import read_object
from updraft.protocol.requests import ChatRequest, CompletionRequest, read_chat, read_completion


def parse_chat(body: bytes) -> ChatRequest:
    return read_chat(read_object(body))


def parse_completion(body: bytes) -> CompletionRequest:
    return read_completion(read_object(body))

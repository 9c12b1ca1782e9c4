"""The shapes in which OpenAI takes text to work on: a string, tokens, or a list of either."""

from __future__ import annotations

from .errors import InvalidRequestError

Prompt = str | list[int]
#: A prompt or several, as on the wire. `prompts_of` tells which.
WirePrompts = str | list[str | int | list[int]]

_MAX_ID = 2**31 - 1


def prompts_of(raw: WirePrompts, param: str, *, at_most: int) -> list[Prompt]:
    """The prompts in `raw`, one or several. Raises InvalidRequestError naming `param`.

    A list of integers is one prompt in tokens; whether the model has these tokens is for the engine to say.
    """
    items = [raw] if isinstance(raw, str) else raw
    tokens = [item for item in items if isinstance(item, int)]
    if tokens and len(tokens) < len(items):
        raise _wrong(param, "a list of token ids holds nothing else")
    prompts: list[Prompt] = [tokens] if tokens else [item for item in items if not isinstance(item, int)]
    if not prompts or not all(prompts):
        raise _wrong(param, "it must not be empty")
    if len(prompts) > at_most:
        raise _wrong(param, f"{len(prompts)} of them are more than the {at_most} that one request may hold")
    if any(not 0 <= token <= _MAX_ID for prompt in prompts if isinstance(prompt, list) for token in prompt):
        raise _wrong(param, f"token ids are 0 to {_MAX_ID}")
    return prompts


def _wrong(param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {what}.", param=param, code="invalid_value")

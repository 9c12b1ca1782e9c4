"""Prompt types of OpenAI's API: a string, a list of token ids, or a list of either."""

from __future__ import annotations

from .errors import invalid_value

Prompt = str | list[int]
#: One prompt or several prompts, as sent by the client. `prompts_of` tells these cases apart.
WirePrompts = str | list[str | int | list[int]]

_MAX_ID = 2**31 - 1


def prompts_of(raw: WirePrompts, param: str, *, at_most: int) -> list[Prompt]:
    """Return the prompts in `raw`. Raises InvalidRequestError naming `param` if `raw` is malformed. A list of integers
    is one prompt in token ids; the engine checks the ids against the model's vocabulary."""
    items = [raw] if isinstance(raw, str) else raw
    tokens = [item for item in items if isinstance(item, int)]
    if tokens and len(tokens) < len(items):
        raise invalid_value(param, "a list of token ids must hold only integers")
    prompts: list[Prompt] = [tokens] if tokens else [item for item in items if not isinstance(item, int)]
    if not prompts or not all(prompts):
        raise invalid_value(param, "prompts must not be empty")
    if len(prompts) > at_most:
        raise invalid_value(param, f"got {len(prompts)} prompts; a request may hold at most {at_most}")
    if any(not 0 <= token <= _MAX_ID for prompt in prompts if isinstance(prompt, list) for token in prompt):
        raise invalid_value(param, f"token ids must be between 0 and {_MAX_ID}")
    return prompts

"""Whether a draft model speaks the target's language: the same ids for the same tokens."""

from __future__ import annotations

from collections.abc import Mapping

from ....protocol.errors import ConfigurationError


def check_same_vocabulary(
    target_rows: int, draft_rows: int, target: Mapping[str, int] | None, draft: Mapping[str, int] | None
) -> None:
    """Raise ConfigurationError unless drafts can be verified.

    `target` and `draft` map tokens to ids, None where a model came without a tokenizer. Heads are often padded to a
    round number of rows, so models of one tokenizer differ in rows: these decide only where there is nothing better.
    """
    if target is None or draft is None:
        if target_rows != draft_rows:
            raise _refusal(f"it has a vocabulary of {draft_rows}, the target of {target_rows}")
        return
    lacking = [token for token, token_id in target.items() if token_id >= draft_rows]
    if lacking:
        raise _refusal(f"it has {draft_rows} tokens, and {len(lacking)} of the target's lie beyond, as {lacking[0]!r}")
    names = {token_id: token for token, token_id in draft.items()}
    different = [token for token, token_id in target.items() if names.get(token_id, token) != token]
    if different:
        token_id = target[different[0]]
        raise _refusal(
            f"{len(different)} of {len(target)} tokens differ: {token_id} is {names[token_id]!r} there, "
            f"{different[0]!r} in the target"
        )


def _refusal(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The draft model cannot be used: {reason}. A draft model must share the target's tokenizer; without one, "
        "predictions of requests are still verified, whatever model wrote them.",
        param="draft",
    )

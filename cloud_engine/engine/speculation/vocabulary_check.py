"""Checks that a draft model has the same token ids as its target."""

from __future__ import annotations

from collections.abc import Mapping

from ....protocol.errors import ConfigurationError


def check_same_vocabulary(
    target_rows: int, draft_rows: int, target: Mapping[str, int] | None, draft: Mapping[str, int] | None
) -> None:
    """Raise ConfigurationError if the draft model's token ids differ from the target's.

    `target` and `draft` map tokens to ids; None for a model without a tokenizer. If either is None, the sizes of the
    output layers must be equal. Otherwise they may differ, because output layers are often padded.
    """
    if target is None or draft is None:
        if target_rows != draft_rows:
            raise _refusal(f"the draft model has {draft_rows} tokens, the target model {target_rows}")
        return
    lacking = [token for token, token_id in target.items() if token_id >= draft_rows]
    if lacking:
        raise _refusal(f"the draft model lacks {len(lacking)} tokens of the target model, such as {lacking[0]!r}")
    names = {token_id: token for token, token_id in draft.items()}
    different = [token for token, token_id in target.items() if names.get(token_id, token) != token]
    if different:
        token_id = target[different[0]]
        raise _refusal(
            f"{len(different)} of {len(target)} tokens differ, such as id {token_id}: {names[token_id]!r} in the draft "
            f"model, {different[0]!r} in the target"
        )


def _refusal(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The draft model cannot be used: {reason}. Use a draft model with the target's tokenizer, or none: "
        "predictions in requests are verified without a draft model.",
        param="draft",
    )

"""Code shared by `ask` and `chat`: streamed answers, and the line that shows where an answer came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...protocol.errors import InvalidRequestError
from ...protocol.responses import UpdraftInfo
from ...protocol.safety.redaction import PrintableStream
from .word_wrap import wrapped

if TYPE_CHECKING:
    from ...router.config import RouterConfig
    from ...sdk import OpenAI

SWITCH = (
    "Real models: --local hf:owner/repo:file.gguf | file.gguf, --cloud-url URL --cloud-model NAME --api-key-env NAME"
)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    info: UpdraftInfo | None


def stream_answer(
    client: OpenAI, messages: Sequence[dict[str, str]], model: str, show: Callable[[str], None], **options: Any
) -> Answer:
    """Stream one answer to `show`, wrapped and without control characters. Ctrl-C cancels the request. Raises
    InvalidRequestError if the last message is not UTF-8."""
    readable = [{name: _unicode(text) for name, text in message.items()} for message in messages]
    if readable[-1] != messages[-1]:
        raise InvalidRequestError("The question is not UTF-8 text.")
    pieces: list[str] = []
    printable = PrintableStream()
    info = None
    with (
        wrapped(show) as shown,
        client.chat.completions.create(model=model, messages=readable, stream=True, **options) as stream,  # type: ignore[call-overload]
    ):
        for chunk in stream:
            if extra := (chunk.model_extra or {}).get("updraft"):
                info = msgspec.convert(extra, UpdraftInfo)
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                pieces.append(text)
                shown(printable.feed(text))
        shown(printable.end())
    return Answer("".join(pieces), info)


def _unicode(text: str) -> str:
    """Return `text` with lone surrogates (JSON escapes of a cloud, bytes that are not UTF-8) replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def provenance(info: UpdraftInfo | None) -> str:
    """Return tier, reason, time and cost: `local: P(gain) 0.03 within threshold 0.19 after generation, 41 ms`."""
    if info is None:
        return "no routing information in this answer"
    where = info.tier if info.route == info.tier else f"{info.tier} ({info.route})"
    parts = [f"{where}: {info.reason}"]
    if info.draft_proposed:
        parts.append(f"{info.draft_accepted} of {info.draft_proposed} draft tokens accepted")
    parts.append(f"{info.latency_ms:.0f} ms")
    if info.cost_usd:
        parts.append(f"${info.cost_usd:.6f}")
    return ", ".join(parts)


def introduction(config: RouterConfig) -> list[str]:
    """Return lines that name the configured models; for the packaged pair, also examples and options for other models.
    Raises ConfigurationError if no model is configured.
    """
    from ...router.factory import check_configured
    from ...router.tiers.local_server.tier import server_address

    check_configured(config)
    if config.local != "pocket":
        local = config.local or "none"
        local = local if server_address(local) else Path(local).stem
        cloud = f"{config.cloud_model} at {config.cloud_url}" if config.cloud_url else "none"
        return [f"on this device: {local}; in the cloud: {cloud}"]
    from ...embedded import pocket

    return [pocket.ABOUT, "Try: " + "  |  ".join(pocket.EXAMPLES), SWITCH]

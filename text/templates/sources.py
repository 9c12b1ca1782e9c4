"""Sources of a model's chat templates: its file, the user, or the default for a model that has none."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...protocol.errors import ConfigurationError

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CHATML_MARK = "<|im_start|>"
LINES = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
_log = logging.getLogger("updraft.text")


@dataclass(frozen=True, slots=True)
class TemplateSources:
    """The templates of one model, as Jinja."""

    default: str
    # The one named `tool_use`; empty where there is none.
    tool_use: str = ""
    # The `ToolFormat` in which tools are told to templates that know none.
    tool_style: str = "hermes"

    @staticmethod
    def named(templates: Mapping[str, str]) -> TemplateSources | None:
        """By their names, as files have several. Without one named `default` the first stands for it."""
        default = templates.get("default") or next(filter(None, templates.values()), "")
        return TemplateSources(default, templates.get("tool_use", "")) if default else None

    @staticmethod
    def of(model: str, own: TemplateSources | None, given: str | None, tokens: Container[str]) -> TemplateSources:
        """The template that the user gives (`chatml`, or the path of a Jinja file), else the model's, else ChatML.

        A model whose special `tokens` lack ChatML's marks would write them as text, again and again: it gets each
        message on a line of its own. Raises ConfigurationError for a file that cannot be read.
        """
        if given == "chatml":
            return TemplateSources(CHATML)
        if given is not None:
            return TemplateSources(_read(Path(given)))
        if own is None:
            knows = CHATML_MARK in tokens
            _log.warning(
                "%s has no chat template: %s. If it was trained on another, give that with --chat-template (or the "
                "setting chat_template).",
                model,
                "ChatML is used" if knows else "each message is put on a line of its own, for a model to continue",
            )
            return TemplateSources(CHATML if knows else LINES)
        return own


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The chat template {path} cannot be read ({error}): give `chatml` or the path of a Jinja file in UTF-8.",
            param="chat_template",
        ) from error

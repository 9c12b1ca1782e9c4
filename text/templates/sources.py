"""Sources of a model's chat templates: the model's files, the user's choice, or a default."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...protocol.errors import ConfigurationError
from ...protocol.validation_messages import plain_words

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CHATML_MARK = "<|im_start|>"
LINES = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
_log = logging.getLogger("updraft.text")


@dataclass(frozen=True, slots=True)
class TemplateSources:
    """Jinja templates of one model."""

    default: str
    # Template named `tool_use`; empty if the model has none.
    tool_use: str = ""
    # Name of the `ToolFormat` for writing tools as text, if the template does not support tools.
    tool_style: str = "hermes"

    @staticmethod
    def named(templates: Mapping[str, str]) -> TemplateSources | None:
        """Select templates by name; without a template named `default`, use the first."""
        default = templates.get("default") or next(filter(None, templates.values()), "")
        return TemplateSources(default, templates.get("tool_use", "")) if default else None

    @staticmethod
    def of_gguf(metadata: Mapping[str, object]) -> TemplateSources | None:
        """Select templates from a GGUF file's metadata."""
        key = "tokenizer.chat_template"
        texts = {name: text for name, text in metadata.items() if name.startswith(key) and isinstance(text, str)}
        more = {name.removeprefix(f"{key}."): text for name, text in texts.items() if name != key}
        return TemplateSources.named({"default": texts.get(key, ""), **more})

    @staticmethod
    def of(model: str, own: TemplateSources | None, given: str | None, tokens: Container[str]) -> TemplateSources:
        """Return the user's template (`chatml`, or the path of a Jinja file), else the model's, else a default.

        The default is ChatML, or one message per line for a model whose `tokens` lack ChatML's marks, since such a
        model would write the marks as text. Raises ConfigurationError if the file cannot be read.
        """
        if given == "chatml":
            return TemplateSources(CHATML)
        if given is not None:
            return TemplateSources(_read(Path(given)))
        if own is None:
            knows = CHATML_MARK in tokens
            _log.warning(
                "%s has no chat template: %s. If the model was trained with another template, set it with "
                "--chat-template (or the setting chat_template).",
                model,
                "using ChatML" if knows else "writing one message per line",
            )
            return TemplateSources(CHATML if knows else LINES)
        return own


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        fault = f"The chat template {path} cannot be read ({plain_words(error)})"
        why = f"{fault}: give `chatml` or the path of a Jinja file in UTF-8."
        raise ConfigurationError(why, param="chat_template") from error

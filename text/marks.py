"""Turn marks that a file does not call special: models have them as tokens of their own, and users may not write them.

GGUF calls such tokens USER_DEFINED, tokenizer.json calls them added and not special. Both also have harmless ones among
them: runs of blanks, words, tags of HTML. Those are read in a user's text as the model learnt them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_BRACKETED = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_TAG_OF_HTML = re.compile(r"</?[a-z]{1,10}[1-6]?/?>")


def typed_marks(tokens: Iterable[str], *templates: str) -> list[str]:
    """Those of a file's own tokens that stay text where a user types them: words in brackets that one of the templates
    writes, or that are no tag of HTML."""
    return [
        token
        for token in tokens
        if _BRACKETED.fullmatch(token)
        and (not _TAG_OF_HTML.fullmatch(token) or any(token in template for template in templates))
    ]

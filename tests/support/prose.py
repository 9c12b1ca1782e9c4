"""The project's texts: sentences and headings of the docs, comments, and docstrings and messages in Python source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"^(```|~~~).*?^\1[^\S\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.*?)\s*$", re.MULTILINE)
# A sentence ends with a punctuation mark and white space, except after these abbreviations. The dots in "0.98" and
# "llama.cpp" end no sentence.
_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'*`)])|(?<=[.!?]\*\*))(?<!e\.g\.)(?<!i\.e\.)(?<!al\.)\s+")

_LITERAL = r"""(?s:"{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
# Matches a block of comment lines, a comment after code, or adjacent string literals, which Python joins.
_IN_SOURCE = re.compile(
    rf"(?P<comments>(?m:^[ \t]*\#.*\n)+|\#.*)|(?P<literals>{_LITERAL}(?:\s*[a-zA-Z]{{0,2}}{_LITERAL})*)"
)
_FIELD = re.compile(r"\{[^{}]*\}")  # replacement field of an f-string


@cache
def pages() -> tuple[Path, ...]:
    return (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))


def prose_pages() -> list[Path]:
    """Return the hand-written pages of the documentation."""
    return [path for path in pages() if path.parent != ROOT / "docs" / "reference"]


def headings(markdown: str) -> list[str]:
    return _HEADING.findall(LINK.sub(lambda link: link["text"], CODE.sub("", markdown)))


def commented_files() -> list[Path]:
    """Return the Makefile and the TOML, JavaScript and C files, except for the sources in local_engine/."""
    patterns = ("*.toml", "router/**/*.js", "examples/**/*.mjs", "kernels/**/*.[ch]")
    return [ROOT / "Makefile", *sorted(path for pattern in patterns for path in ROOT.glob(pattern))]


def sentences_in_comments(path: Path) -> Iterator[str]:
    """Yield the sentences of a file's comments, which begin with "//" or "/*" in C and JavaScript, else with "#"."""
    text, mark = path.read_text(encoding="utf-8"), "//" if path.suffix in (".c", ".h", ".js", ".mjs") else "#"
    for match in re.finditer(rf"(?m:^[ \t]*{mark}.*\n)+|(?<=\s){mark}+ .*|/\*(?s:.*?)\*/", text):
        plain = re.sub(rf"(?m)^[ \t]*(?:{mark}+|/?\*+(?!/))[: ]*|\*/", "", match[0])
        yield from ("# " + sentence for sentence in sentences(cleandoc(plain)))


def sentences(markdown: str) -> list[str]:
    """Split paragraphs and list items into sentences, without code, tables, headings and link targets."""
    text = _COMMENT.sub("", CODE.sub("", markdown))
    text = LINK.sub(lambda link: link["text"], text)
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        stripped = line.strip().removeprefix(">").strip()
        if not stripped or stripped.startswith(("#", "|")) or line.startswith("    "):
            blocks.append([])
        elif re.match(r"(?:[-*]|\d+\.) ", stripped):
            blocks.append([re.sub(r"^(?:[-*]|\d+\.) ", "", stripped)])
        else:
            blocks[-1].append(stripped)
    return [sentence for block in blocks if block for sentence in _END.split(" ".join(block))]


def sentences_in_source(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) of each comment, docstring and message. Sentences of comments begin with "# "."""
    at, line = 0, 1
    for match in _IN_SOURCE.finditer(source):
        at, line = match.start(), line + source.count("\n", at, match.start())
        if match["comments"]:
            mark, text = "# ", re.sub(r"(?m)^[ \t]*#[: ]*", "", match[0])
        else:
            mark, text = "", "".join(literal[0].strip("\"'") for literal in re.finditer(_LITERAL, match[0]))
            text = _FIELD.sub("x", text.replace("\\n", "\n").replace("\\", ""))
        if " " in text.strip():
            yield from ((line, mark + sentence) for sentence in sentences(cleandoc(text)))

"""The docs: total size, sentence length, links, and the form of decisions and changelog.

Words and sentences are counted on hand-written pages only. The pages of docs/reference are generated from the code
(`test_reference.py`); only their links are checked here.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from import_graph import LAYERS
from prose import CODE, LINK, ROOT, pages, prose_pages, sentences

MAX_WORDS = 25_000
MAX_WORDS_IN_A_SENTENCE = 20.0  # on average
MAX_WORDS_IN_A_DECISION = 300
MAX_WORDS_IN_A_SUPERSEDED_ONE = 75  # one paragraph: the old decision, and the reason for its end
MAX_LINES_IN_THE_CHANGELOG = 150
DECISIONS = ROOT / "docs" / "decisions"

_HEADING = re.compile(r"^#{1,6} +(.*?)\s*$", re.MULTILINE)
_STATUS = re.compile(r"^\*\*Status:\*\* (accepted|superseded by \[(?P<number>\d{3})\]\(\S+\))$", re.MULTILINE)


def words(text: str) -> int:
    """Count the words that have a letter or a digit; the bars of a table do not count."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub generates for a page's headings."""
    headings = _HEADING.findall(CODE.sub("", path.read_text(encoding="utf-8")))
    plain = (LINK.sub(lambda link: link["text"], heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def broken_links(path: Path) -> list[str]:
    wrong: list[str] = []
    for link in LINK.finditer(CODE.sub("", path.read_text(encoding="utf-8"))):
        target = link["target"]
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / unquote(name)).resolve() if name else path
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(target)
    return wrong


def test_the_docs_are_short() -> None:
    by_page = {path.relative_to(ROOT).as_posix(): words(path.read_text(encoding="utf-8")) for path in prose_pages()}
    longest = sorted(by_page.items(), key=lambda item: -item[1])[:10]
    assert sum(by_page.values()) <= MAX_WORDS, f"the longest pages: {longest}"


def test_sentences_are_short() -> None:
    counted = [
        (words(sentence), path.relative_to(ROOT).as_posix(), sentence)
        for path in prose_pages()
        for sentence in sentences(path.read_text(encoding="utf-8"))
    ]
    worst = sorted(counted, reverse=True)[:10]
    listed = "\n".join(f"{count:4} {page}: {sentence}" for count, page, sentence in worst)
    print(f"the ten longest sentences:\n{listed}")
    assert sum(count for count, _, _ in counted) / len(counted) <= MAX_WORDS_IN_A_SENTENCE, listed


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_have_a_target(path: Path) -> None:
    assert broken_links(path) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading: `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#a-heading-code) [c](gone.md) [d](there.md#gone) [e](https://x.example/)\n"
        "```\n[f](not-a-link.md)\n```\n"
    )
    assert broken_links(page) == ["gone.md", "there.md#gone"]


def test_text_is_split_into_sentences() -> None:
    text = (
        "# A heading\n\nOne idea. llama.cpp 0.98 is one (Wu et al., 2016): another\none [a link](far/away.md).\n\n"
        "- an **item.** Two\n\n| a | b |\n\n```\ncode. Code.\n```\n"
    )
    assert sentences(text) == [
        "One idea.",
        "llama.cpp 0.98 is one (Wu et al., 2016): another one a link.",
        "an **item.**",
        "Two",
    ]


DECISION_PAGES = sorted(DECISIONS.glob("[0-9]*.md"))


@pytest.mark.parametrize("path", DECISION_PAGES, ids=lambda path: path.stem)
def test_a_decision_has_status_and_sections(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    number = path.name[:3]
    assert text.startswith(f"# {number}: ")
    status = _STATUS.search(text)
    assert status, "a status line: accepted, or superseded by [NNN](page)"
    by = status["number"]
    assert by is None or (int(by) > int(number) and list(DECISIONS.glob(f"{by}-*.md")))
    assert _HEADING.findall(text)[1:] == ([] if by else ["Context", "Decision", "Consequences"])
    assert words(text) <= (MAX_WORDS_IN_A_SUPERSEDED_ONE if by else MAX_WORDS_IN_A_DECISION)


def test_the_index_has_every_decision() -> None:
    row = re.compile(r"^\| (\d{3}) \| \[(.*)\]\((\S+)\) \| (.*) \|$", re.MULTILINE)
    listed = [match.groups() for match in row.finditer((DECISIONS / "README.md").read_text(encoding="utf-8"))]
    expected = []
    for path in DECISION_PAGES:
        text = path.read_text(encoding="utf-8")
        status = _STATUS.search(text)
        title = text.splitlines()[0].partition(": ")[2]
        expected.append((path.name[:3], title, path.name, status[1] if status else ""))
    assert listed == expected
    assert [int(number) for number, *_ in listed] == list(range(1, len(listed) + 1))


def test_the_site_has_every_page() -> None:
    """The navigation lists every page but the decisions, which their index links."""
    listed = re.findall(
        r"^ +- (?:[\w ]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    existing = {path.relative_to(ROOT / "docs").as_posix() for path in pages() if path.is_relative_to(ROOT / "docs")}
    assert len(listed) == len(set(listed))
    assert set(listed) == {name for name in existing if not re.match(r"decisions/\d", name)}


def test_the_changelog_is_one_line_per_change() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES_IN_THE_CHANGELOG
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["[0.1.0] - unreleased"]
    body = text.partition("## [0.1.0]")[2].partition("### ")[2].splitlines()[1:]
    assert [line for line in body if line and not line.startswith(("- ", "### "))] == []


def test_no_text_installs_the_package_from_an_index() -> None:
    """The package is not published yet: every text installs it from a clone."""
    suffixes = {".py", ".md", ".toml", ".yml", ".yaml"}
    files = [path for path in ROOT.rglob("*") if path.suffix in suffixes and path.is_file()]
    own = [
        path for path in files if not {".venv", ".typing", ".git", "build", "out"} & set(path.relative_to(ROOT).parts)
    ]
    wrong = re.compile(r"pip install [^\n]*updraft-llm")
    assert [
        str(path) for path in own if path != Path(__file__).resolve() and wrong.search(path.read_text("utf-8"))
    ] == []


@pytest.mark.parametrize(("page", "least"), [("architecture", 12), ("places", 30)])
def test_the_architecture_names_files_that_exist(page: str, least: int) -> None:
    """Paths in backticks that begin with a package or with `tests` exist."""
    text = (ROOT / "docs" / "explanation" / f"{page}.md").read_text(encoding="utf-8")
    named = re.findall(rf"`((?:tests|{'|'.join(LAYERS)})/[\w/.-]*)`", text)
    assert len(named) > least
    assert [path for path in named if not (ROOT / path).exists()] == []

"""`make reference`: regenerates docs/reference, which `tests/architecture/test_reference.py` compares with the code."""

from __future__ import annotations

from pathlib import Path

from .pages import pages

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""`make reference`: regenerates docs/reference, which `tests/architecture/test_reference.py` compares with the code."""

from __future__ import annotations

from pathlib import Path

from .commands import cli_page
from .ledger import ledger_page
from .metrics import metrics_page
from .routes import routes_page
from .settings import settings_page

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    return {
        "cli.md": cli_page(),
        "settings.md": settings_page(),
        "metrics.md": metrics_page(),
        "routes.md": routes_page(),
        "ledger.md": ledger_page(),
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")

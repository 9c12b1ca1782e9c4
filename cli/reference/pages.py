"""Pages of docs/reference by file name."""

from __future__ import annotations

from .commands import cli_page
from .ledger import ledger_page
from .metrics import metrics_page
from .routes import routes_page
from .settings import settings_page


def pages() -> dict[str, str]:
    return {
        "cli.md": cli_page(),
        "settings.md": settings_page(),
        "metrics.md": metrics_page(),
        "routes.md": routes_page(),
        "ledger.md": ledger_page(),
    }

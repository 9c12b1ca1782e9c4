"""The training command's tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..policy.trace_policy import PolicyCard
from .leave_one_out import LeaveOneOutReport


def show_card(card: PolicyCard) -> None:
    """Print what calibration promises for each target."""
    on = card.trained_on
    title = f"{card.models['local']} / {card.models['cloud']}: {on.rows} rows, gain on {on.gain_rate:.1%}"
    table = _table(title, "target", "before", "during", "after", "quality (calibration)", "cloud share", "confidence")
    for target in card.thresholds:
        cut = target.thresholds
        cells = (cut.before, cut.during, cut.after)
        table.add_row(
            f"{target.quality:g}",
            *(f"{cell:.3f}" for cell in cells),
            f"{target.predicted_quality:.4f}",
            f"{target.cloud_share:.1%}",
            f"{target.confidence:.0%}",
        )
    Console().print(table)


def show_report(report: LeaveOneOutReport) -> None:
    """Print the evaluation on held-out rows."""
    console = Console()
    title = f"{report.rows} test rows: local {report.local_score:.1%}, cloud {report.cloud_score:.1%}"
    gates = _table(title, "gate", 'AUROC "local is wrong"', "95 %", "AUROC gain", f"ECE ({_bins(report)} bins)")
    for gate, found in report.gates.items():
        low, high = found.auroc_wrong_interval
        gates.add_row(
            gate, f"{found.auroc_wrong:.3f}", f"{low:.3f}-{high:.3f}", f"{found.auroc_gain:.3f}", f"{found.ece:.3f}"
        )
    best = report.best_single_signal
    gates.add_row(f"best single signal: {best}", f"{report.single_signals[best]:.3f}", "", "", "")
    console.print(gates)
    kinds = _table("by kind", "kind", "rows", "local", "cloud", "gate 3", "mean log-probability")
    for kind in report.kinds:
        kinds.add_row(
            kind.group,
            str(kind.rows),
            f"{kind.local_score:.1%}",
            f"{kind.cloud_score:.1%}",
            f"{kind.auroc:.3f}",
            f"{kind.token_confidence:.3f}",
        )
    console.print(kinds)
    left = _table("left out of training: median AUROC", "group", "groups", "gate 3", "mean log-probability")
    for found in report.leave_out:
        counted = sum(group.auroc == group.auroc for group in found.groups)
        left.add_row(found.by, str(counted), f"{found.median:.3f}", f"{found.median_token_confidence:.3f}")
    console.print(left)
    routed = _table("routed", "target", "quality", "95 %", "accuracy", "cloud share", "by gate 1", "by gate 2")
    for found in report.routed:
        low, high = found.quality_interval
        run = found.simulation
        routed.add_row(
            f"{found.target:g}",
            f"{found.quality:.4f}",
            f"{low:.3f}-{high:.3f}",
            f"{run.routed:.1%}",
            f"{run.cloud_share:.1%}",
            f"{run.before_share:.1%}",
            f"{run.during_share:.1%}",
        )
    console.print(routed)


def _bins(report: LeaveOneOutReport) -> int:
    return report.gates["gate3"].ece_bins


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table

"""The cost-quality curve of `updraft bench router` for people: in the terminal, as PNG, and the figures as Markdown."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np

from ..classifier.evaluation.cost_quality import CostQualityCurve
from ..protocol.errors import MissingDependencyError
from .report import Report
from .router import Measured

__all__ = ["markdown_table", "save_png", "terminal_plot"]

_WIDTH, _HEIGHT = 60, 16


def terminal_plot(curve: CostQualityCurve, oracle: CostQualityCurve) -> str:
    """Accuracy against the share of strong calls: `*` the router, `o` the oracle, `.` a router that tosses coins."""
    chance = CostQualityCurve(np.array([0.0, 1.0]), np.array([curve.weak, curve.strong]), curve.weak, curve.strong)
    low = min(curve.accuracy.min(), curve.weak)
    high = max(oracle.accuracy.max(), low + 1e-9)
    canvas = [[" "] * (_WIDTH + 1) for _ in range(_HEIGHT + 1)]
    for points, mark in ((chance, "."), (oracle, "o"), (curve, "*")):
        for column, accuracy in enumerate(np.interp(np.linspace(0, 1, _WIDTH + 1), points.share, points.accuracy)):
            canvas[_HEIGHT - round(_HEIGHT * (accuracy - low) / (high - low))][column] = mark
    lines = [f"{high:7.1%} |", *(" " * 8 + "|" for _ in range(_HEIGHT - 1)), f"{low:7.1%} |"]
    drawn = [label + "".join(row).rstrip() for label, row in zip(lines, canvas, strict=True)]
    axis = " " * 8 + "+" + "-" * (_WIDTH + 1)
    legend = " " * 9 + "0 %  strong calls  100 %     * router   o oracle   . random"
    return "\n".join((*drawn, axis, legend))


def save_png(measured: Measured, path: Path) -> None:
    """The same as a picture. Raises MissingDependencyError without matplotlib."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        message = "matplotlib is not installed: pip install '.[plot]' in a clone of Updraft."
        raise MissingDependencyError(message) from error
    figure = figure_module.Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for curve, name in ((measured.oracle, "oracle"), (measured.curve, "router")):
        axes.plot(100 * curve.share, 100 * curve.accuracy, label=name)
    axes.plot([0, 100], [100 * measured.curve.weak, 100 * measured.curve.strong], "--", color="grey", label="random")
    axes.set_xlabel("strong calls (%)")
    axes.set_ylabel("accuracy (%)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def markdown_table(report: Report) -> str:
    """Every metric of a report as a Markdown table, with the settings, machine and commit above it."""
    config = ", ".join(f"{name} {value}" for name, value in report.config.items() if value is not None)
    head = [config, "", f"{report.machine['cores']} cores, {report.machine['cpu']}, commit {report.commit}", ""]
    rows = [f"| {name} | {value:.4g} |" for name, value in report.metrics.items()]
    return "\n".join((*head, "| metric | value |", "|---|---:|", *rows)) + "\n"

"""Plots the error by module. No other module imports matplotlib."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from .report import Report


def write_plot(report: Report, path: Path) -> None:
    """Plot the relative error of every entry, in order of execution. The file name's suffix chooses the format.

    ModuleNotFoundError if matplotlib is not installed.
    """
    figure_module: Any = import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(max(6.0, len(report.entries) * 0.09), 4.5), layout="constrained")
    axes = figure.add_subplot()
    layers = [index for index, entry in enumerate(report.entries) if entry.name.endswith(".input_layernorm")]
    # A logarithmic axis cannot show an error of 0.
    errors = [max(entry.relative_error, 1e-9) for entry in report.entries]
    axes.semilogy(range(len(errors)), errors, marker=".", linewidth=0.8)
    axes.axhline(report.tolerance, color="red", linewidth=0.8, label=f"tolerance {report.tolerance:g}")
    for index in layers:
        axes.axvline(index, color="lightgray", linewidth=0.5, zorder=0)
    first = report.first_departure
    if first is not None:
        index = report.entries.index(first)
        axes.annotate(first.name, (index, errors[index]), textcoords="offset points", xytext=(4, 8), color="red")
    axes.set_xlabel("module, in order of execution (gray: start of a layer)")
    axes.set_ylabel("max |x - y| / max |y|")
    axes.legend()
    figure.savefig(path)

# SPDX-License-Identifier: Apache-2.0
"""A report as a picture: acceptance by position, and the speed-up to expect against k.

matplotlib is imported here and nowhere else, when a picture is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.planning.model import MAX_K, Step, fit

from .report import Report


class PlotError(Exception):
    """There is no picture; the message says why and what to do."""


def available(path: Path) -> None:
    """That a picture can be drawn into a file.

    Raises:
        PlotError: it cannot.
    """
    try:
        import matplotlib
    except ImportError:
        raise PlotError(
            "--plot needs matplotlib, which is not installed: pip install 'vllm-kimi-eagle3[plot]'"
        ) from None
    del matplotlib
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise PlotError(f"--plot {path}: the name ends with .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"--plot {path}: there is no folder {path.absolute().parent}")


def plot(report: Report, path: Path) -> None:
    """Draws a report.

    Raises:
        PlotError: nothing was measured, or it cannot be drawn or written.
    """
    available(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if report.measured is None:
        raise PlotError(f"--plot {path}: nothing was measured, so there is nothing to draw")
    title = " ".join(
        part for part in (report.model, report.drafter and f"+ {report.drafter}") if part
    )
    try:
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _acceptance(left, report)
        _gains(right, report)
        # A name may have dollar signs, and is no formula.
        figure.suptitle(title or report.url, fontsize=10, parse_math=False)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise PlotError(f"--plot {path} cannot be written: {error.strerror}") from None
    except (ValueError, ArithmeticError) as error:
        raise PlotError(f"--plot {path} cannot be drawn: {error}") from None


def _acceptance(axes: Any, report: Report) -> None:
    measured = report.measured
    assert measured is not None
    positions = range(1, measured.counts.positions + 1)
    values = [rate.value for rate in measured.rates]
    below = [rate.value - rate.low for rate in measured.rates]
    above = [rate.high - rate.value for rate in measured.rates]
    axes.bar(positions, values, width=0.6, color="#4c72b0", label="measured, 95 % interval")
    axes.errorbar(positions, values, yerr=[below, above], fmt="none", ecolor="black", capsize=4)
    if report.expected is not None:
        expected = report.expected.for_positions(measured.counts.positions).rates
        axes.plot(positions, expected, "o--", color="#dd8452", label="expected")
    axes.set_ylim(0, 1)
    axes.set_xticks(list(positions))
    axes.set_xlabel("draft")
    axes.set_ylabel("accepted, part of the steps")
    axes.set_title(f"{measured.length.value:.2f} tokens a step", fontsize=10)
    axes.legend(fontsize=8)


def _gains(axes: Any, report: Report) -> None:
    """The speed-up for one request, by what one or two servers took for a step."""
    measured = report.measured
    assert measured is not None
    steps = []
    k = round(measured.counts.draft_tokens / measured.counts.drafts)
    context = report.context or 0.0
    if report.speed:
        steps.append(Step(k, 1, context, measured.length.value / report.speed))
    if report.speed_without:
        steps.append(Step(0, 1, context, 1 / report.speed_without))
    axes.set_xlabel("drafts a step")
    axes.set_ylabel("times the tokens a second without drafts")
    try:
        model = fit(steps)
    except ValueError:  # There is none, or of a size or time that cannot be.
        axes.set_title("no step was timed", fontsize=10)
        return
    rates = [rate.value for rate in measured.rates]
    every = range(MAX_K + 1)
    gains = [model.speed_up(n, 1, context, rates) for n in every]
    axes.fill_between(
        every, [g.low for g in gains], [g.high for g in gains], color="#4c72b0", alpha=0.2
    )
    known = len(rates)
    values = [gain.value for gain in gains]
    axes.plot(every[: known + 1], values[: known + 1], "o-", color="#4c72b0", label="reckoned")
    axes.plot(
        every[known:], values[known:], "o:", color="#4c72b0", label="if later drafts hold as well"
    )
    if report.speed and report.speed_without:
        axes.plot([k], [report.speed / report.speed_without], "*", ms=12, color="#dd8452",
                  label="measured")  # fmt: skip
    axes.axhline(1.0, color="grey", lw=0.8)
    both = "both servers timed" if len(steps) == 2 else "one server timed, the rest is usual"
    axes.set_title(f"one request at a time; {both}", fontsize=10)
    axes.legend(fontsize=8)

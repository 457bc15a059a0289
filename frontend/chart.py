"""The picture of a capacity plan: sessions over the pool's memory, and what takes the pool. Needs matplotlib.

Knows no arithmetic: it asks the plan for itself at other sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from radixrt.runtime import InvalidRequest

from .terminal import bytes_text

if TYPE_CHECKING:
    from .planner import CapacityPlan

_COLOURS = ("#9a9a9a", "#d08a2e", "#2f6db3", "#2e8b57")  # told apart in grey and by the colour-blind too
_UNUSED = "#e8e8e8"


def draw(plan: CapacityPlan, path: Path) -> None:
    """Write the picture in the format that the path's suffix names.

    InvalidRequest where matplotlib is absent or has no such format, OSError where the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest("plot: matplotlib is not installed; pip install 'radixrt[plot]'") from error
    figure: Any = Figure(figsize=(11, 4.4), layout="constrained")
    kind = path.suffix.removeprefix(".").lower()
    formats = figure.canvas.get_supported_filetypes()
    if kind not in formats:
        raise InvalidRequest(f"plot: {str(path)!r} names no picture format; end it in .png or .svg")
    sessions, shares = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _draw_sessions(sessions, plan)
    _draw_shares(shares, plan)
    figure.suptitle(plan.summary(), fontsize=9, x=0.01, ha="left")
    figure.savefig(path, format=kind, dpi=150)


def _draw_sessions(axes: Any, plan: CapacityPlan) -> None:
    """A line for each way, from an eighth of the plan's memory to eight times it, where the longest request fits."""
    longest = int((plan.lengths.prompt + plan.lengths.output).max()) + plan.pool.shared_prefix + plan.pool.page_size
    sizes = [round(plan.kv_bytes * 2 ** (step / 4)) for step in range(-12, 13)]
    sizes = [size for size in sizes if size >= min(longest * plan.token_bytes, plan.kv_bytes)]
    sessions = np.array([[way.sessions for way in plan.at(size).ways] for size in sizes])
    for way, counts, colour in zip(plan.ways, sessions.T, _COLOURS, strict=False):
        axes.plot(sizes, np.where(counts > 0, counts, np.nan), color=colour, linewidth=2)
        if way.sessions > 0:
            axes.plot(plan.kv_bytes, way.sessions, "o", color=colour)
    axes.axvline(plan.kv_bytes, color="black", linewidth=0.7, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes[::4], [bytes_text(size, digits=3) for size in sizes[::4]])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(color=_UNUSED)
    axes.set_xlabel("memory of the KV pool")
    axes.set_title("Sessions at once", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_shares(axes: Any, plan: CapacityPlan) -> None:
    """A bar for each way: the part of the pool that holds tokens. Its names are the other panel's legend too."""
    names = [f"{way.name}\n{way.sessions:,.0f} at once" for way in plan.ways]
    live = [way.live_share for way in plan.ways]
    colours = _COLOURS[: len(names)]
    rows = range(len(names))
    axes.barh(rows, [1.0] * len(names), color=_UNUSED)
    axes.barh(rows, live, color=colours)
    axes.set_yticks(rows, names)
    for number, share in enumerate(live):
        outside = share < 0.15
        axes.annotate(
            f"{share:.0%}",
            (share, number),
            textcoords="offset points",
            xytext=(5 if outside else -5, 0),
            ha="left" if outside else "right",
            va="center",
            color="black" if outside else "white",
            fontweight="bold",
        )
    for label, colour in zip(axes.get_yticklabels(), colours, strict=True):
        label.set_color(colour)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title("Share of the pool that holds tokens", loc="left")

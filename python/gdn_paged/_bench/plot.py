"""A picture of a run: time over tokens, a panel per head layout, the floor drawn in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .operations import Row
from .report import Recorded

MISSING = "plot: needs matplotlib, which is not installed; pip install matplotlib"


def check_plot(path: Path) -> None:
    """Refuses before anything is measured.

    Raises:
        ValueError: another ending than .png or .svg, no such directory, or no matplotlib.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"plot: {path} given; expected a name that ends in .png or .svg")
    if not path.parent.is_dir():
        raise ValueError(f"plot: {path.parent} is no directory")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(MISSING) from None


def draw(path: Path, rows: list[Row], recorded: Recorded | None, title: str) -> None:
    """Writes a PNG or an SVG, by the ending of `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layouts = list(dict.fromkeys((row["heads"], row["hq"], row["hv"]) for row in rows))
    columns = min(3, len(layouts))
    lines = -(-len(layouts) // columns)
    figure = Figure(figsize=(1 + 4.2 * columns, 1.2 + 3.4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for panel in panels.flat[len(layouts) :]:
        panel.set_axis_off()
    for panel, (name, hq, hv) in zip(panels.flat, layouts, strict=False):
        _panel(panel, [row for row in rows if row["heads"] == name], recorded)
        panel.set_title(f"{name}: Hq/Hv {hq}/{hv}" if name != f"{hq}/{hv}" else f"Hq/Hv {name}")
    panels.flat[0].legend(fontsize="small")
    decode = "batch" in rows[0]
    figure.supxlabel("rows in the batch (one token each)" if decode else "new tokens of the call")
    figure.supylabel("microseconds")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _panel(panel: Any, rows: list[Row], recorded: Recorded | None) -> None:
    """Ours, the floor and the recorded contenders over tokens; a set per dtype of the states."""
    for i, state in enumerate(dict.fromkeys(row.get("state", "") for row in rows)):
        part = sorted((r for r in rows if r.get("state", "") == state), key=lambda r: r["tokens"])
        mark = f" ({state} states)" if state else ""
        color = f"C{i}"
        x = [row["tokens"] for row in part]
        single = [row for row in part if state or row["lens"].startswith("1x")]
        panel.plot(x, [row["us"] for row in part], "o", color=color, label=f"gdn_paged{mark}")
        panel.plot([r["tokens"] for r in single], [r["us"] for r in single], "-", color=color)
        floor = [row["floor_us"] for row in part]
        panel.plot(x, floor, "--", color=color, alpha=0.6, label=f"floor{mark}")
        contenders = sorted(
            {name for row in part for name in (recorded.of(row) if recorded else ())}
        )
        for marker, name in zip("x+^v1234", contenders, strict=False):
            found = [(r["tokens"], recorded.of(r).get(name)) for r in part] if recorded else []
            points = [(tokens, us) for tokens, us in found if us is not None]
            panel.plot(
                *zip(*points, strict=True), marker, color=color, label=f"{name}{mark}",
                fillstyle="none", alpha=0.7, markersize=5, zorder=1,
            )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.grid(True, which="major", alpha=0.3)

"""Log-log curves, as SVG and PNG."""

from __future__ import annotations

from pathlib import Path

Curves = dict[str, tuple[list[float], list[float]]]  # name: (x, y)
Panel = tuple[str, str, Curves]  # what is on the axes, and the curves
MARKERS = "osD^v<>"


def lines(path: Path, panels: list[Panel]) -> None:
    """Panels side by side, into `path`.svg and `path`.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 3.8), squeeze=False, layout="constrained"
    )
    for axes, (x_label, y_label, curves) in zip(all_axes[0], panels, strict=True):
        for marker, (name, (x, y)) in zip(MARKERS, curves.items(), strict=False):
            dashed = "--" if name.startswith("jax") else "-"
            axes.plot(x, y, dashed, marker=marker, markersize=4, linewidth=1.4, label=name)
        axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
        axes.grid(which="major", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    # Without a date and with fixed ids, the same numbers give the same file.
    pyplot.rcParams["svg.hashsalt"] = "fedgrad"
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=140)
    pyplot.close(figure)

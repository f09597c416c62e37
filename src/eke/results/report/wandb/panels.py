"""The panels of a report at W&B, over the keys that eke logs."""

from types import ModuleType
from typing import Any

from eke.results.report.wandb.keys import LOSS, PEAK_BYTES, SAMPLES_PER_S, STEP, TIME
from eke.results.report.wandb.place import Filter, Place

WIDTH, HEIGHT = 24, 8
"""Columns of W&B's grid, and rows of one panel of it."""
MAX_RUNS = 100
"""Lines and bars that a panel shows; W&B's own default is 10."""

SPEED_TITLE, MEMORY_TITLE = "samples/s", "peak memory, bytes"


def panel_grid(
    library: ModuleType, found: Filter, place: Place | None, factors: list[str], groups: list[str]
) -> Any:
    """All panels over one run set.

    Args:
        library: wandb_workspaces.reports.v2.
        found: which runs.
        place: their project, looked up at the server; None for the report's own, which needs none.
        factors: paths in W&B's config of what differs.
        groups: those of them that runs are grouped and coloured by.
    """
    return library.PanelGrid(
        runsets=[run_set(library, found, place, factors, groups)], panels=_panels(library)
    )


def run_set(
    library: ModuleType, found: Filter, place: Place | None, factors: list[str], groups: list[str]
) -> Any:
    """The compared runs, the fastest first, grouped by what differs."""
    where = {"entity": place.entity, "project": place.project} if place else {}
    measured = [f"summary:{SAMPLES_PER_S}", f"summary:{PEAK_BYTES}"]
    return library.Runset(
        **where,
        name="compared runs",
        filters=_expression(found),
        groupby=[f"config.{path}" for path in groups],
        order=[library.OrderBy(library.SummaryMetric(SAMPLES_PER_S), ascending=False)],
        pinned_columns=[*(f"config:{path}" for path in factors), *measured],
    )


def _expression(found: Filter) -> str:
    """As wandb-workspaces reads it; the names are plain (see Filter)."""
    key, names = ("Group", found.groups) if found.groups else ("ID", found.ids)
    chosen = f"== {names[0]!r}" if len(names) == 1 else f"in {list(names)!r}"
    return f"Metric({key!r}) {chosen}"


def _panels(library: ModuleType) -> list[Any]:
    half = WIDTH // 2
    # Over the runs of a group: their mean, from the lowest to the highest.
    over = {"groupby_aggfunc": "mean", "groupby_rangefunc": "minmax", "max_runs_to_show": MAX_RUNS}

    def at(row: int, column: int = 0, width: int = half) -> Any:
        return library.Layout(x=column * half, y=row * HEIGHT, w=width, h=HEIGHT)

    def bars(title: str, key: str, column: int) -> Any:
        return library.BarPlot(
            title=title, metrics=[key], max_bars_to_show=MAX_RUNS, layout=at(1, column), **over
        )

    def lines(title: str, key: str, unit: str, column: int) -> Any:
        return library.LinePlot(
            title=title, x=key, y=[LOSS], title_x=unit, title_y="train loss",
            layout=at(2, column), **over,
        )  # fmt: skip

    return [
        library.ScatterPlot(
            title=f"{SPEED_TITLE} over {MEMORY_TITLE}",
            x=library.SummaryMetric(PEAK_BYTES),
            y=library.SummaryMetric(SAMPLES_PER_S),
            layout=at(0, width=WIDTH),
        ),
        bars(SPEED_TITLE, SAMPLES_PER_S, 0),
        bars(MEMORY_TITLE, PEAK_BYTES, 1),
        lines("train loss over steps", STEP, "step", 0),
        lines("train loss over training time", TIME, "s of training steps", 1),
        library.RunComparer(diff_only="split", layout=at(3, width=WIDTH)),
    ]

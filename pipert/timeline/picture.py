"""Draws a timeline like figure 8 of the paper; needs matplotlib (the extra ``plot``).

It uses a figure of its own and not ``pyplot``, which keeps state for the whole process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pipert.observe.event import BACKWARD, COPY, FORWARD, RECOMPUTE, WAIT, WEIGHT, Event

# The colours of a box and of the micro-batch's number in it, from back to front.
_COLOURS = {
    WAIT: ("#ececec", None),
    COPY: ("#e45756", None),
    FORWARD: ("#4c78a8", "white"),
    BACKWARD: ("#59a14f", "white"),
    WEIGHT: ("#b6d7a8", "black"),
    RECOMPUTE: ("#9ecae9", "black"),
}


class Drawable(Protocol):
    """The parts of a timeline that are drawn."""

    @property
    def events(self) -> Sequence[Event]: ...
    @property
    def lanes(self) -> Sequence[str]: ...
    def lane(self, event: Event) -> int: ...


def save_picture(timelines: Mapping[str, Drawable], path: str | Path, width: float = 12.0) -> None:
    """Draw each timeline under its title, all to the same scale, ``width`` inches wide."""
    if find_spec("matplotlib") is None:
        raise ImportError(
            "a picture needs matplotlib: pip install matplotlib; save() writes a trace without it"
        )
    # Fixed salt, no dates: equal timelines give equal files. The text of an SVG stays text.
    with import_module("matplotlib").rc_context({"svg.hashsalt": "pipert", "svg.fonttype": "none"}):
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure, suffix = _figure(timelines, width), Path(path).suffix.lower()
        figure.savefig(path, dpi=150, metadata=metadata.get(suffix))


def _figure(timelines: Mapping[str, Drawable], width: float) -> Any:
    heights = [1 + len(timeline.lanes) for timeline in timelines.values()]
    figure = import_module("matplotlib.figure").Figure(
        figsize=(width, 0.8 + 0.42 * sum(heights)), layout="constrained"
    )
    grid = {"height_ratios": heights}
    inch = max([end - start for start, end in map(_span, timelines.values())]) / width
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
    for axes, (title, timeline) in zip(rows, timelines.items(), strict=True):
        _draw(axes, timeline, inch)
        axes.set_title(title, loc="left", fontsize=10)
    rows[-1].set_xlabel("milliseconds")
    kinds = {event.kind for timeline in timelines.values() for event in timeline.events}
    patch = import_module("matplotlib.patches").Patch
    shown = [patch(color=colour, label=k) for k, (colour, _) in _COLOURS.items() if k in kinds]
    figure.legend(
        handles=shown, loc="outside upper right", ncols=len(_COLOURS), frameon=False, fontsize=8
    )
    return figure


def _span(timeline: Drawable) -> tuple[float, float]:
    """Return when the first event begins, and when the last one ends."""
    times = [time for event in timeline.events for time in (event.start, event.end)] or [0.0]
    return min(times), max(times)


def _draw(axes: Any, timeline: Drawable, inch: float) -> None:
    """Draws the lanes one below the other, with copies as a thin bar under the tasks.

    Args:
        inch: the seconds that an inch shows; numbers are left out where they do not fit.
    """
    events, (start, _) = timeline.events, _span(timeline)
    boxes: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        boxes.setdefault((event.kind, timeline.lane(event)), []).append(event)
    for kind, (colour, text) in _COLOURS.items():
        for lane in range(len(timeline.lanes)):
            drawn = boxes.get((kind, lane), [])
            top, height = (lane + 0.26, 0.16) if kind == COPY else (lane - 0.4, 0.62)
            spans = [(1e3 * (event.start - start), 1e3 * event.seconds) for event in drawn]
            axes.broken_barh(
                spans, (top, height), facecolors=colour, linewidth=0.4,
                edgecolors="white" if text else "none",
            )  # fmt: skip
            for event, (left, length) in zip(drawn, spans, strict=True):
                number = str(event.micro_batch)
                if text and event.seconds > 0.07 * len(number) * inch:
                    axes.text(
                        left + length / 2, top + height / 2, number, ha="center", va="center",
                        fontsize=7, color=text, clip_on=True,
                    )  # fmt: skip
    axes.set_yticks(range(len(timeline.lanes)), timeline.lanes)
    axes.set_ylim(len(timeline.lanes) - 0.4, -0.6)  # the first lane on top
    axes.spines[["top", "right"]].set_visible(False)

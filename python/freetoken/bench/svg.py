"""Small SVG drawings for benchmark reports (torch-free, no plotting library)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

ROW_HEIGHT = 56
WIDTH, LEFT, RIGHT = 860, 300, 40


@dataclass(frozen=True)
class PairRow:
    """Ratios of one metric: of the control pairs, of the pairs, and the noise floor as a factor."""

    label: str
    control: Sequence[float]
    pairs: Sequence[float]
    floor: float


def document(width: int, height: int, body: Sequence[str], title: str) -> str:
    """A whole SVG file around ``body``, with ``title`` for readers that do not see it."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *body,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, value: str, *, anchor: str = "start", fill: str = "#222") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(value)}</text>'


def pair_plot(rows: Sequence[PairRow], title: str) -> str:
    """Every pair's ratio b / a as a dot on a logarithmic axis, the control's in grey above it, the noise floor as a band."""
    reach = max([1.02, *(max(r, 1 / r) for row in rows for r in (*row.control, *row.pairs, row.floor))])
    span = math.log(reach) * 1.1
    middle, half = (LEFT + WIDTH - RIGHT) / 2, (WIDTH - RIGHT - LEFT) / 2

    def x(ratio: float) -> float:
        return middle + half * math.log(ratio) / span

    height = 60 + ROW_HEIGHT * len(rows) + 30
    body = [
        text(16, 24, title),
        text(LEFT, 44, "B lower", fill="#666"),
        text(WIDTH - RIGHT, 44, "B higher", anchor="end"),
    ]
    for index, row in enumerate(rows):
        y = 60 + ROW_HEIGHT * index
        low, high = x(1 / row.floor), x(row.floor)
        body.append(f'<rect x="{low:.1f}" y="{y}" width="{high - low:.1f}" height="{ROW_HEIGHT - 10}" fill="#eef0f4"/>')
        body.append(text(16, y + 26, row.label))
        for ratios, offset, fill in ((row.control, 15, "#9aa3b2"), (row.pairs, 33, "#c2410c")):
            body += [
                f'<circle cx="{x(r):.1f}" cy="{y + offset}" r="4" fill="{fill}" fill-opacity="0.7"/>' for r in ratios
            ]
    bottom = 60 + ROW_HEIGHT * len(rows)
    for ratio in (1 / reach, 1.0, reach):
        body.append(f'<line x1="{x(ratio):.1f}" y1="54" x2="{x(ratio):.1f}" y2="{bottom}" stroke="#c8ccd4"/>')
        body.append(text(x(ratio), bottom + 16, f"{ratio:.3f}", anchor="middle", fill="#666"))
    return document(WIDTH, height, body, title)

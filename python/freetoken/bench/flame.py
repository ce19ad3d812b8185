"""A profile as a flame-style drawing: the step, its roles, and the kernels of each, as wide as they take long (torch-free)."""

from __future__ import annotations

import colorsys
import zlib
from html import escape

from freetoken.bench import svg
from freetoken.profiling.roles import ROLES
from freetoken.profiling.summary import Profile, title

WIDTH, MARGIN, BAR, TOP = 1200, 16, 34, 48
NARROWEST = 0.4
"""Pixels; what is narrower is left out, its place stays empty."""
LETTER = 6.6
GAP_FILL, STEP_FILL = "#d5d8de", "#8d99ae"


def _fill(role: str, level: int) -> str:
    place = ROLES.index(role) if role in ROLES else zlib.crc32(role.encode()) % len(ROLES)
    red, green, blue = colorsys.hls_to_rgb(place / len(ROLES), 0.66 + 0.12 * (level - 1), 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _bar(x: float, width: float, level: int, fill: str, label: str, detail: str) -> list[str]:
    """A rectangle with a tooltip, and its label as far as there is room."""
    if width < NARROWEST:
        return []
    y = TOP + level * (BAR + 2)
    shown = label if len(label) * LETTER <= width - 8 else label[: max(0, int((width - 8) / LETTER) - 2)] + ".."
    parts = [
        f'<g><title>{escape(detail)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{fill}" '
        'stroke="white" stroke-width="0.5"/>'
    ]
    if len(shown) > 3:
        parts.append(svg.text(x + 4, y + BAR / 2 + 4, shown))
    return ["".join(parts) + "</g>"]


def draw(profile: Profile) -> str:
    """An SVG file. Roles stand in the order of a forward pass, kernels by their time, gaps at the end."""
    scale = (WIDTH - 2 * MARGIN) / profile.step_us if profile.step_us else 0.0

    def detail(name: str, us: float) -> str:
        share = us / profile.step_us if profile.step_us else 0.0
        return f"{name}: {us:,.2f} us, {share:.1%} of the step"

    step = f"step {profile.step_us:,.1f} us, busy {profile.busy:.1%}"
    body = [svg.text(MARGIN, 26, title(profile))]
    body += _bar(MARGIN, profile.step_us * scale, 0, STEP_FILL, step, step)
    x = float(MARGIN)
    for row in profile.roles:
        body += _bar(x, row.us * scale, 1, _fill(row.role, 1), row.role, detail(row.role, row.us))
        inner = x
        for kernel in profile.kernels:
            if kernel.role == row.role:
                text = f"{detail(kernel.name, kernel.us)}, {kernel.launches:.4g} launches"
                body += _bar(inner, kernel.us * scale, 2, _fill(row.role, 2), kernel.name, text)
                inner += kernel.us * scale
        x += row.us * scale
    body += _bar(x, profile.gap_us * scale, 1, GAP_FILL, "gaps", detail("gaps", profile.gap_us))
    return svg.document(WIDTH, TOP + 3 * (BAR + 2) + MARGIN, body, title(profile))

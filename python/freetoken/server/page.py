"""The page at ``/``: one file without outside assets, which runs only its own script (torch-free)."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

_FILE = Path(__file__).with_name("page.html")


def _source(html: str, tag: str) -> str:
    """The ``script-src`` or ``style-src`` expression for the one inline ``tag`` of the page."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def load() -> tuple[bytes, dict[str, str]]:
    """The page and the headers it is sent with. Its policy names the script and the style by their hashes, lets them reach
    this server alone, and forbids everything else."""
    html = _FILE.read_text(encoding="utf-8")
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src {_source(html, 'script')}; style-src {_source(html, 'style')}"
    )
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return html.encode(), headers

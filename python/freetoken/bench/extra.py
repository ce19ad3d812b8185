"""What the extra ``bench`` installs and the package alone does not need."""

from __future__ import annotations

try:
    import aiohttp
except ModuleNotFoundError:
    raise SystemExit("error: clients of a server need aiohttp: pip install 'freetoken-runtime[bench]'") from None

__all__ = ["aiohttp"]

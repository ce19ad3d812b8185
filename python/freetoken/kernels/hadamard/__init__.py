"""Signs and Walsh-Hadamard rotation of activations whose weights are stored rotated."""

from __future__ import annotations

from freetoken.kernels.hadamard.reference import rotate, unrotate

__all__ = ["rotate", "unrotate"]

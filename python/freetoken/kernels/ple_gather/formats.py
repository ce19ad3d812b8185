"""How a row of a table is stored (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32
"""Elements that share a float16 factor in the formats of GGUF files."""
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen codes of IQ4_NL stand for, as published with the format."""
Q4_0_VALUES = tuple(range(-8, 8))


@dataclass(frozen=True)
class RowFormat:
    """``block`` elements in ``block_bytes`` bytes. ``f8_e4m3`` is the finite kind (fn), times a scale of the whole table. A block of
    the others begins with a float16 factor. In ``q8_0`` signed bytes follow; in ``iq4_nl`` and ``q4_0`` the codes of elements 0
    to 15 in low and 16 to 31 in high halves of bytes, which ``codebook`` gives values."""

    name: str
    block: int
    block_bytes: int
    codebook: tuple[int, ...] | None = None

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of ``width`` elements; ``ValueError`` when it is no whole number of blocks."""
        if width < 1 or width % self.block:
            raise ValueError(f"rows of {width} elements are not whole blocks of {self.block}, as {self.name} needs")
        return width // self.block * self.block_bytes


FORMATS: dict[str, RowFormat] = {
    row.name: row
    for row in (
        RowFormat("f32", 1, 4),
        RowFormat("f16", 1, 2),
        RowFormat("bf16", 1, 2),
        RowFormat("f8_e4m3", 1, 1),
        RowFormat("q8_0", BLOCK, 34),
        RowFormat("q4_0", BLOCK, 18, Q4_0_VALUES),
        RowFormat("iq4_nl", BLOCK, 18, IQ4_NL_VALUES),
    )
}

"""How a row of a table is stored (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass

IQ4_NL_BLOCK, IQ4_NL_BYTES = 32, 18
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen codes of IQ4_NL stand for, as published with the format."""


@dataclass(frozen=True)
class RowFormat:
    """``block`` elements in ``block_bytes`` bytes. ``f8_e4m3`` is the finite kind (fn), times a scale of the whole table; a block of
    ``iq4_nl`` is a float16 factor, then the codes of elements 0 to 15 in low and 16 to 31 in high halves of bytes."""

    name: str
    block: int
    block_bytes: int

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
        RowFormat("iq4_nl", IQ4_NL_BLOCK, IQ4_NL_BYTES),
    )
}

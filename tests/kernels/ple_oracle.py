"""Row ids in Python's own integers, one token at a time, and the worked examples that every implementation is held to."""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.models.ple_config import HashConstants
from ple_geometry import PRODUCTION

OVERFLOW = HashConstants((2**62 + 3, 2**61 + 5, 2**60 + 7), (1009, 1013, 1019, 1021), (0, 1009, 2022, 3041))


def signed(value: int) -> int:
    """The two's-complement reading of the low 64 bits."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def window(history: Sequence[int], n: int, eos: int) -> list[int]:
    """The last id of ``history`` and the n - 1 to its left, cut at the first boundary or at the beginning."""
    found = [history[-1]]
    for shift in range(1, n):
        left = [history[-1 - back] if back < len(history) else eos for back in range(1, shift + 1)]
        found.append(eos if eos in left else left[-1])
    return found


def scalar_rows(history: Sequence[int], constants: HashConstants, eos: int) -> list[int]:
    """Row ids of the last id of ``history``, which holds everything the request has seen."""
    n = len(constants.multipliers)
    per_order = len(constants.vocab_sizes) // (n - 1)
    words = window(history, n, eos)
    rows = []
    for head, (size, offset) in enumerate(zip(constants.vocab_sizes, constants.offsets, strict=True)):
        mix = 0
        for word, factor in zip(words[: 2 + head // per_order], constants.multipliers, strict=False):
            mix ^= signed(word * factor)
        # Python's remainder is the floored one.
        rows.append(signed(mix) % size + offset)
    return rows


E = PRODUCTION.boundary_id
FRESH = [11762, 279, 20438, 1881, 279, 9212, 6681, 13, 271]
FIRST_TOKEN = [
    15277278, 32918184, 45570257, 79574599, 98420318, 118853009, 120268271, 143585820,
    175176060, 197288956, 202542870, 236741304, 240513213, 265496279, 287426521, 319095437,
]  # fmt: skip
# Production constants, fresh requests: {position: rows of heads 0, 1, 8, 9}.
GOLDENS: list[tuple[list[int], dict[int, tuple[int, int, int, int]]]] = [
    (
        FRESH,
        {
            0: (15277278, 32918184, 175176060, 197288956),
            1: (3506531, 35278321, 168265205, 190492688),
            2: (9707655, 26790501, 168972593, 196388648),
            3: (1089119, 32936352, 166098091, 190763263),
            8: (5129529, 22831471, 170383671, 190827692),
        },
    ),
    (
        [11762, E, 279, 20438, 1881],
        {
            1: (13968623, 26960635, 179438531, 184574334),
            2: (18902458, 39688754, 166411215, 187770738),
            3: (9707655, 26790501, 179412563, 186526423),
            4: (1089119, 32936352, 166098091, 190763263),
        },
    ),
    (
        [E, E, 5, E],
        {
            0: (9663979, 26558231, 170054832, 192967038),
            1: (9663979, 26558231, 170054832, 192967038),
            2: (15389869, 39778609, 179763390, 197956758),
            3: (18392917, 34857659, 173113148, 192355065),
        },
    ),
]
SMALL_TOKENS = [[3, 4, 7, 5, 6, 8], [2, 7, 11, 12, 13, 14], [7]]
SMALL_CONTEXTS = [[7, 7], [21, 22], [31, 7]]
SMALL_ROWS = [
    [883, 1988, 2795, 3714], [105, 1826, 2064, 3895], [365, 2017, 2662, 3065],
    [131, 1966, 2423, 3454], [364, 1785, 2045, 3807], [210, 1630, 2777, 3529],
    [956, 1320, 2342, 3538], [733, 1764, 2272, 3553], [516, 1784, 2186, 3988],
    [286, 1319, 2991, 3866], [472, 1114, 2482, 3322], [590, 1960, 2530, 3637],
    [250, 1670, 2210, 3082],
]  # fmt: skip
OVERFLOW_CASES = [([2, 1], 3, [973, 1373, 2702, 3190]), ([100, 200], 511, [452, 1244, 2533, 3507])]

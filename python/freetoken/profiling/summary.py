"""Profiles of the kinds of steps in a trace, and their table (torch-free)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from freetoken.errors import StartupError
from freetoken.profiling.accounting import BY_NAME, UNKNOWN, Account, Piece, Step, account
from freetoken.profiling.roles import ROLES
from freetoken.profiling.trace import Trace
from freetoken.profiling.traffic import PARTIAL, Facts, step_bytes, step_operations

KERNELS_SHOWN = 20
NAME_WIDTH = 64


@dataclass(frozen=True)
class KernelRow:
    """A kernel (on a CPU an operator) in a role: microseconds and launches a step. It ran for ``us`` and ``hidden_us``, the latter under
    kernels that began before it, whose time that is."""

    role: str
    name: str
    us: float
    launches: float
    hidden_us: float = 0.0


@dataclass(frozen=True)
class RoleRow:
    """A role: microseconds a step, microseconds of gaps before its kernels, launches, bytes and operations. ``roof_us`` is what it could
    take at best, 0 where that is not known. ``hidden_us`` as of a kernel."""

    role: str
    us: float
    gap_us: float
    launches: float
    bytes: float
    operations: float
    roof_us: float
    hidden_us: float = 0.0

    @property
    def gb_s(self) -> float:
        """10^9 bytes a second."""
        return self.bytes / self.us / 1e3 if self.us else 0.0

    @property
    def share(self) -> float | None:
        """Of the roof, ``None`` where that is not known."""
        return self.roof_us / self.us if self.roof_us and self.us else None


@dataclass(frozen=True)
class Profile:
    """One kind of step, ``decode``, ``prefill`` or ``mixed``: means over ``steps`` steps, microseconds.

    ``step_us`` is the sum of all roles' ``us`` and of ``gap_us``. ``launches`` counts pieces of work, ``host_launches`` calls that put them on
    the GPU. ``guessed`` is the share of the time whose role was found by the kernel's name alone, or not at all. ``hidden_us`` is what
    kernels ran under others, in no sum. ``run_us`` is the time of all whole steps of the kind together, chained or not: the means leave some
    out, a clock around the run does not.
    """

    kind: str
    device: str
    steps: int
    values: dict[str, float]
    step_us: float
    gap_us: float
    launches: float
    host_launches: float
    guessed: float
    roles: list[RoleRow]
    kernels: list[KernelRow]
    hidden_us: float = 0.0
    run_us: float = 0.0

    @property
    def busy(self) -> float:
        """Share of the step in which the device works."""
        return 1.0 - self.gap_us / self.step_us if self.step_us else 0.0

    def public(self) -> dict[str, Any]:
        """JSON-ready."""
        roles = [{**asdict(row), "gb_s": row.gb_s, "share": row.share} for row in self.roles]
        return {**asdict(self), "busy": self.busy, "roles": roles}


def profiles(trace: Trace, facts: Facts | None = None) -> list[Profile]:
    """A profile of each kind of step in ``trace``; ``facts`` take the place of those in the trace. Of a kind that has chained steps these
    alone count, as they are what a busy server runs. :class:`StartupError` if no step is in the trace from its beginning."""
    facts = Facts.of(trace.facts) if facts is None else facts
    found = account(trace)
    by_kind: dict[str, list[int]] = defaultdict(list)
    present = {piece.step for piece in found.pieces}
    for number, step in enumerate(found.steps):
        if number in present and found.whole[number]:
            by_kind[step.kind].append(number)
    if not by_kind:
        raise StartupError("no whole step of the model runner is in this trace")
    result = []
    for kind, numbers in sorted(by_kind.items()):
        chained = [n for n in numbers if found.steps[n].chained]
        every = set(numbers)
        run_us = sum(piece.us + piece.gap for piece in found.pieces if piece.step in every)
        result.append(replace(_profile(kind, chained or numbers, found, facts), run_us=run_us))
    return result


def _profile(kind: str, numbers: Sequence[int], found: Account, facts: Facts) -> Profile:
    chosen, count = set(numbers), len(numbers)
    pieces = [piece for piece in found.pieces if piece.step in chosen]
    values = _mean_values([found.steps[n] for n in numbers])
    busy, gaps = sum(p.us for p in pieces), sum(p.gap for p in pieces)
    guessed = sum(p.us for p in pieces if p.how in (BY_NAME, UNKNOWN))
    return Profile(
        kind=kind,
        device=facts.device or ("cuda" if found.on_gpu else "cpu"),
        steps=count,
        values=values,
        step_us=(busy + gaps) / count,
        gap_us=gaps / count,
        launches=sum(_launches(found, p) for p in pieces) / count,
        host_launches=len({(p.step, p.launch) for p in pieces if p.launch is not None}) / count,
        guessed=guessed / busy if busy else 0.0,
        roles=_role_rows(pieces, values, facts, found, count),
        kernels=_kernel_rows(pieces, found, count),
        hidden_us=sum(p.hidden for p in pieces) / count,
    )


def _launches(found: Account, piece: Piece) -> int:
    return 1 if found.on_gpu or piece.launch is not None else 0


def _mean_values(steps: Sequence[Step]) -> dict[str, float]:
    totals: Counter[str] = Counter()
    for step in steps:
        totals.update({key: value for key, value in step.values.items() if key != "chained"})
    return {key: total / len(steps) for key, total in totals.items()}


def _role_rows(
    pieces: Sequence[Piece], values: dict[str, float], facts: Facts, found: Account, count: int
) -> list[RoleRow]:
    moved, computed = step_bytes(facts, values), step_operations(facts, values)
    rows = []
    known = {role: place for place, role in enumerate(ROLES)}
    for role in sorted({p.role for p in pieces}, key=lambda role: (known.get(role, len(known)), role)):
        mine = [p for p in pieces if p.role == role]
        size, work = moved.get(role, 0.0), computed.get(role, 0.0)
        roof = 0.0
        if facts.bandwidth and facts.rate and role not in PARTIAL:
            roof = max(size / facts.bandwidth, work / facts.rate) * 1e6
        times = sum(p.us for p in mine) / count, sum(p.gap for p in mine) / count
        launches, hidden = (sum(part) / count for part in zip(*((_launches(found, p), p.hidden) for p in mine)))
        rows.append(RoleRow(role, *times, launches, size, work, roof, hidden))
    return rows


def _kernel_rows(pieces: Sequence[Piece], found: Account, count: int) -> list[KernelRow]:
    """The longest first."""
    spent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for piece in pieces:
        entry = spent[(piece.role, piece.name)]
        entry[0] += piece.us
        entry[1] += _launches(found, piece)
        entry[2] += piece.hidden
    rows = [KernelRow(*key, *(total / count for total in totals)) for key, totals in spent.items()]
    return sorted(rows, key=lambda row: (-row.us, row.role, row.name))


def title(profile: Profile) -> str:
    """What the profile is of, in one line."""
    v = profile.values
    parts = [
        f"{v.get('requests', 0):g} requests",
        f"{v.get('tokens', 0):g} tokens",
        f"{v.get('read', 0):,.0f} tokens of KV",
    ]
    return f"{profile.kind}, {', '.join(parts)}, {profile.device}, mean of {profile.steps} steps"


def table(profile: Profile, kernels: int = KERNELS_SHOWN) -> str:
    """Roles, then the ``kernels`` longest kernels, as text. Empty cells are what does not apply or is not known."""
    lines = [
        title(profile),
        f"{'role':<14} {'us':>10} {'of step':>8} {'gaps us':>9} {'hidden us':>9} {'launches':>9} {'MB':>10} {'GB/s':>8} {'GFLOP':>9} {'of roof':>8}",
    ]

    def cell(value: float, form: str) -> str:
        return format(value, form) if value else ""

    def share(us: float) -> str:
        return f"{us / profile.step_us:.1%}" if profile.step_us else ""

    for row in profile.roles:
        roof = "" if row.share is None else f"{row.share:.1%}"
        lines.append(
            f"{row.role:<14} {row.us:>10.2f} {share(row.us):>8} {cell(row.gap_us, '.2f'):>9} {cell(row.hidden_us, '.2f'):>9} "
            f"{cell(row.launches, '.4g'):>9} "
            f"{cell(row.bytes / 1e6, '.3f'):>10} {cell(row.gb_s if row.bytes else 0.0, '.1f'):>8} "
            f"{cell(row.operations / 1e9, '.3f'):>9} {roof:>8}"
        )
    if profile.gap_us:
        lines.append(f"{'gaps':<14} {profile.gap_us:>10.2f} {share(profile.gap_us):>8}")
    size = sum(row.bytes for row in profile.roles) / 1e6
    lines.append(
        f"{'step':<14} {profile.step_us:>10.2f} {'':>8} {cell(profile.gap_us, '.2f'):>9} {cell(profile.hidden_us, '.2f'):>9} "
        f"{profile.launches:>9.4g} {cell(size, '.3f'):>10}"
    )
    if profile.device != "cpu":
        lines.append(f"busy {profile.busy:.1%}, {profile.host_launches:.4g} launches by the host")
    if profile.hidden_us:
        lines.append(
            f"kernels run under others for {profile.hidden_us:.2f} us a step, which counts once, as the time of the one that began first"
        )
    if profile.guessed:
        lines.append(f"{profile.guessed:.1%} of the time has its role by the kernel's name alone, or none")
    if kernels:
        lines += ["", f"{'us':>10} {'hidden us':>9} {'launches':>9}  {'role':<14} kernel"]
        for kernel in profile.kernels[:kernels]:
            name = kernel.name if len(kernel.name) <= NAME_WIDTH else kernel.name[: NAME_WIDTH - 3] + "..."
            hidden = cell(kernel.hidden_us, ".2f")
            lines.append(f"{kernel.us:>10.2f} {hidden:>9} {cell(kernel.launches, '.4g'):>9}  {kernel.role:<14} {name}")
    return "\n".join(lines) + "\n"

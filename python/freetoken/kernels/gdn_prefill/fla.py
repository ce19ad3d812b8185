"""The chunked prefill of flash-linear-attention (``fla-core``) behind our own signature, where it can be used.

Chunk tables come from the host, so nothing is read back. Its kernels tune themselves at their first call, for many seconds: a
model that uses it makes that call before it serves.
"""

from __future__ import annotations

import importlib
import inspect
from importlib import metadata
from typing import Any

import torch

from freetoken.kernels.gdn_prefill.plan import CHUNK, Plan

MODULE = "fla.ops.gated_delta_rule"
NEEDED = ("cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "state_v_first", "use_beta_sigmoid_in_kernel")
"""Parameters of ``chunk_gated_delta_rule`` that not all versions have."""


def _function() -> Any:
    return importlib.import_module(MODULE).chunk_gated_delta_rule


def installed_version() -> str | None:
    """Version of the installed package, or ``None``."""
    try:
        return metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return None


def unusable() -> str:
    """One clause that says why the package cannot be used here; ``""`` when it can. Loads it when it is installed."""
    version = installed_version()
    if version is None:
        return "fla-core is not installed"
    try:
        parameters = inspect.signature(_function()).parameters
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"fla-core {version} does not load: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    missing = [name for name in NEEDED if name not in parameters]
    return f"fla-core {version} lacks {missing[0]}" if missing else ""


def gdn_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    rec_state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    plan: Plan,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.gdn_prefill.reference.gdn_prefill`, with a plan made for it; no synchronisation."""
    if plan.fla is None:
        return torch.empty_like(v, memory_format=torch.contiguous_format)
    tables = plan.fla
    if tables.pieces is not None:
        slots, starts = slots[tables.pieces], starts[tables.pieces]
    owned = slots >= 0
    rows = slots.clamp(min=0)
    goes_on = (owned & (starts > 0))[:, None, None, None]
    initial = torch.where(goes_on, rec_state[rows], 0.0)
    out, last = _function()(
        q[None].contiguous(),
        k[None].contiguous(),
        v[None].contiguous(),
        a[None].contiguous(),
        b[None].contiguous(),
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        state_v_first=True,
        cu_seqlens=tables.cu_seqlens,
        cu_seqlens_cpu=tables.cu_seqlens_cpu,
        chunk_indices=tables.chunk_indices,
        chunk_size=CHUNK,
    )
    _store(rec_state, rows, owned, last)
    return out[0].to(v.dtype)


def _store(rec_state: torch.Tensor, rows: torch.Tensor, owned: torch.Tensor, last: torch.Tensor) -> None:
    """``rec_state[rows] = last`` where ``owned``. The other pieces repeat the write of the first owned one; when there is
    none they write back what their row holds."""
    source = torch.where(owned, torch.arange(len(rows), device=rows.device), owned.int().argmax())
    target = rows[source]
    values = torch.where(owned.any(), last[source].to(rec_state.dtype), rec_state[target])
    rec_state.index_copy_(0, target, values)

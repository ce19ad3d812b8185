"""Dense products of few rows: a matrix-vector kernel for one row, tensor-core kernels for up to 32.

A product may run *under* the kernel launched right before it, where that is compiled ``LATE`` (:mod:`freetoken.kernels.launch`): it
reads x at once, and waits only ahead of its first write of the output. Parts of split products and their counters are written before
that, so that kernel must not be one of these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv
from freetoken.kernels.small_gemm.configs import GemmConfig, m_class, max_tokens, pick_config
from freetoken.kernels.small_gemm.narrow import _squash, narrow_kernel


class Scratch:
    """Memory for the parts of split products, sized before any graph is captured and shared by all calls of a stream.

    ``parts`` is float32; ``arrivals`` counts programs that delivered theirs and is zero between calls.
    """

    def __init__(self) -> None:
        self.parts: torch.Tensor | None = None
        self.arrivals: torch.Tensor | None = None

    def reserve(self, n: int, config: GemmConfig, rows: int, halves: int, device: torch.device | str) -> None:
        """Make room for the parts ``[rows, halves * n]`` of one launch; a no-op for unsplit products."""
        if config.split_k == 1:
            return
        if config.kind == "fragments":
            rows = 8 if rows <= 8 else cdiv(rows, 16) * 16
        parts, blocks = config.split_k * rows * halves * n, cdiv(n, config.block_n) * cdiv(rows, 16)
        if self.parts is None or self.parts.numel() < parts:
            self.parts = torch.empty(parts, dtype=torch.float32, device=device)
        if self.arrivals is None or self.arrivals.numel() < blocks:
            self.arrivals = torch.zeros(blocks, dtype=torch.int32, device=device)


@triton.jit
def _finish(total, bias_ptr, column, inside, HAS_BIAS: tl.constexpr, STORAGE: tl.constexpr):
    """Adds the bias ``[.., BLOCK_N]`` to a float32 block and rounds it to the storage type."""
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return total.to(STORAGE)


@triton.jit
def _activate(gate, up, STORAGE: tl.constexpr):
    """``silu(gate) * up`` with the roundings of the unfused op; both arrive in the storage type."""
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(STORAGE).to(tl.float32)
    return (active * up.to(tl.float32)).to(STORAGE)


@triton.jit
def _weights(tile, start, row, offset, end, N: tl.constexpr, EVEN: tl.constexpr, STAYS: tl.constexpr = False):
    """The ``[BLOCK_N, BLOCK_K]`` weights from column ``start`` on; zero outside ``N`` rows and from ``end`` on. ``STAYS``: by loads that
    the assembler does not move behind a wait that follows."""
    if EVEN:
        return tl.load(tile + start, volatile=STAYS)
    inside = (row[:, None] < N) & (offset[None, :] < end - start)
    return tl.load(tile + start, mask=inside, other=0.0, volatile=STAYS)


@triton.jit
def _activations(x_ptr, start, offset, end, EVEN: tl.constexpr, CACHE: tl.constexpr):
    """``x`` from column ``start`` on as float32 ``[1, BLOCK_K]``; zero from ``end`` on."""
    if EVEN:
        return tl.load(x_ptr + start + offset, cache_modifier=CACHE).to(tl.float32)[None, :]
    x = tl.load(x_ptr + start + offset, mask=offset < end - start, other=0.0, cache_modifier=CACHE)
    return x.to(tl.float32)[None, :]


@launched
@triton.jit
def gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    SQUASHED: tl.constexpr,
    DIVISOR: tl.constexpr,
    EARLY: tl.constexpr,
    UNDER: tl.constexpr,
):
    """One row: ``out [N] = x [K] @ weight [N, K]^T``; with ``SILU`` the weight is ``[2N, K]``.

    Grid ``(ceil(N / BLOCK_N), SPLIT_K)``. Each thread keeps its own partial sums along K and the block reduces once at
    the end.
    """
    STORAGE: tl.constexpr = x_ptr.dtype.element_ty
    CACHE: tl.constexpr = ".cg" if UNDER else ""
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % (BLOCK_K * SPLIT_K) == 0
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * (STEPS * BLOCK_K)
    end = tl.minimum(begin + STEPS * BLOCK_K, K)
    offset = tl.arange(0, BLOCK_K)
    tile = weight_ptr + row.to(tl.int64)[:, None] * K + offset[None, :]
    gate_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32) if SILU else gate_sum
    # The first weights are asked for before the kernel that makes x has ended.
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    asked = ()
    for step in tl.static_range(AHEAD):
        start = begin + step * BLOCK_K
        gate = _weights(tile, start, row, offset, end, N, EVEN, AHEAD > 1)
        up = _weights(tile + N * K, start, row, offset, end, N, EVEN, AHEAD > 1) if SILU else gate
        asked += ((gate, up),)
    if EARLY and not UNDER:
        tl.extra.cuda.gdc_wait()
    for step in tl.static_range(AHEAD):
        gate, up = asked[step]
        x = _activations(x_ptr, begin + step * BLOCK_K, offset, end, EVEN, CACHE)
        gate_sum += gate.to(tl.float32) * x
        if SILU:
            up_sum += up.to(tl.float32) * x
    for start in tl.range(begin + AHEAD * BLOCK_K, begin + STEPS * BLOCK_K, BLOCK_K, loop_unroll_factor=UNROLL):
        x = _activations(x_ptr, start, offset, end, EVEN, CACHE)
        gate_sum += _weights(tile, start, row, offset, end, N, EVEN).to(tl.float32) * x
        if SILU:
            up_sum += _weights(tile + N * K, start, row, offset, end, N, EVEN).to(tl.float32) * x

    total = tl.sum(gate_sum, axis=1)
    other = tl.sum(up_sum, axis=1) if SILU else total
    inside = row < N
    last = True
    if SPLIT_K > 1:
        HALVES: tl.constexpr = 2 if SILU else 1
        mine = parts_ptr + tl.program_id(1) * (N * HALVES) + row
        tl.store(mine, total, mask=inside)
        if SILU:
            tl.store(mine + N, other, mask=inside)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            total = tl.zeros((BLOCK_N,), tl.float32)
            other = tl.zeros((BLOCK_N,), tl.float32)
            for part in tl.static_range(SPLIT_K):
                source = parts_ptr + part * (N * HALVES) + row
                total += tl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
                if SILU:
                    other += tl.load(source + N, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(arrivals_ptr + tl.program_id(0), 0)
    if last:
        value = _finish(total, bias_ptr, row, inside, HAS_BIAS, STORAGE)
        value = _squash(value, row, SQUASHED, DIVISOR, STORAGE)
        if SILU:
            value = _activate(value, _finish(other, bias_ptr + N, row, inside, HAS_BIAS, STORAGE), STORAGE)
        if EARLY and UNDER:
            tl.extra.cuda.gdc_wait()
        tl.store(out_ptr + row, value.to(out_ptr.dtype.element_ty), mask=inside)


@launched
@triton.jit(do_not_specialize=["m"])
def gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    m,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
    UNDER: tl.constexpr,
):
    """``m`` (up to ``M``, 16 or 32) rows: ``out [m, N] = x [m, K] @ weight [N, K]^T``; with ``SILU`` the weight is ``[2N, K]``.

    Grid ``(ceil(N / BLOCK_N), SPLIT_K)``; rows of x above ``m`` count as zero.
    """
    STORAGE: tl.constexpr = x_ptr.dtype.element_ty
    CACHE: tl.constexpr = ".cg" if UNDER else ""
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % (BLOCK_K * SPLIT_K) == 0
    token = tl.arange(0, M)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * (STEPS * BLOCK_K)
    end = tl.minimum(begin + STEPS * BLOCK_K, K)
    offset = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + token[:, None] * K + offset[None, :]
    tile = weight_ptr + row.to(tl.int64)[:, None] * K + offset[None, :]
    total = tl.zeros((BLOCK_N, M), tl.float32)
    other = tl.zeros((BLOCK_N, M), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if EARLY and not UNDER:
        tl.extra.cuda.gdc_wait()
    # Weights are the left operand: 64 or more rows of them fill a warp group's product, and the tokens are its columns.
    for start in tl.range(begin, begin + STEPS * BLOCK_K, BLOCK_K):
        inside = token[:, None] < m
        if not EVEN:
            inside = inside & (offset[None, :] < end - start)
        x = tl.trans(tl.load(x_tile + start, mask=inside, other=0.0, cache_modifier=CACHE))
        gate = _weights(tile, start, row, offset, end, N, EVEN)
        total = tl.dot(gate, x, total, input_precision="ieee")
        if SILU:
            up = _weights(tile + N * K, start, row, offset, end, N, EVEN)
            other = tl.dot(up, x, other, input_precision="ieee")

    inside = (row[:, None] < N) & (token[None, :] < m)
    last = True
    if SPLIT_K > 1:
        HALVES: tl.constexpr = 2 if SILU else 1
        cell = token[None, :] * (N * HALVES) + row[:, None]
        mine = parts_ptr + tl.program_id(1) * (M * N * HALVES) + cell
        tl.store(mine, total, mask=inside)
        if SILU:
            tl.store(mine + N, other, mask=inside)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            total = tl.zeros((BLOCK_N, M), tl.float32)
            other = tl.zeros((BLOCK_N, M), tl.float32)
            for part in tl.static_range(SPLIT_K):
                source = parts_ptr + part * (M * N * HALVES) + cell
                total += tl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
                if SILU:
                    other += tl.load(source + N, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(arrivals_ptr + tl.program_id(0), 0)
    if last:
        value = _finish(total, bias_ptr, row[:, None], row[:, None] < N, HAS_BIAS, STORAGE)
        if SILU:
            second = _finish(other, bias_ptr + N, row[:, None], row[:, None] < N, HAS_BIAS, STORAGE)
            value = _activate(value, second, STORAGE)
        if EARLY and UNDER:
            tl.extra.cuda.gdc_wait()
        out = out_ptr + token[None, :].to(tl.int64) * N + row[:, None]
        tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    silu: bool,
    config: GemmConfig,
    scratch: Scratch | None,
    under: bool,
    squash: tuple[int, int] = (0, 1),
) -> None:
    m, k = x.shape
    n = out.shape[1]
    parts, arrivals = out, out
    halves = (torch.float16, torch.bfloat16)
    fragments = config.kind == "fragments"
    if fragments and (silu or k % 32 or x.dtype not in halves):
        raise ValueError(f"{config} cannot run {x.dtype} of width {k}{' with the activation' if silu else ''}")
    if config.split_k > 1:
        if scratch is None or scratch.parts is None or scratch.arrivals is None:
            raise ValueError("a split product needs reserved scratch memory")
        parts, arrivals = scratch.parts, scratch.arrivals
    settings = {
        "N": n,
        "K": k,
        "SPLIT_K": config.split_k,
        "HAS_BIAS": bias is not None,
        "EARLY": launch.early(x),
        "UNDER": under,
        "launch_pdl": launch.early(x),
        "num_warps": config.num_warps,
    }
    tiles = {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "SILU": silu}
    grid = (cdiv(n, config.block_n), config.split_k)
    beside = (weight if bias is None else bias, out, parts, arrivals)
    squashed = {"SQUASHED": squash[0], "DIVISOR": squash[1]}
    if m == 1 and not fragments:
        steps = cdiv(k, config.block_k * config.split_k)
        unrolled = {"UNROLL": config.unroll, "AHEAD": min(config.ahead, steps)}
        gemv_kernel[grid](x, weight, *beside, **unrolled, **squashed, **tiles, **settings)
    elif not fragments:
        if squash[0]:
            raise ValueError(f"{config} cannot squash the outputs of {m} rows")
        gemm_kernel[grid](x, weight, *beside, m, M=m_class(m), num_stages=config.num_stages, **tiles, **settings)
    else:
        own = {"WARPS": config.num_warps, "UNROLL": config.unroll, "HALVES": 1 if m <= 8 else 2}
        own |= {"BF16": x.dtype == torch.bfloat16, "ON_GPU": x.is_cuda, **squashed}
        narrow_kernel[(*grid, cdiv(m, 16))](
            x.view(torch.int32), weight.view(torch.int32), *beside, m, **own, **settings
        )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    config: GemmConfig | None = None,
    scratch: Scratch | None = None,
    under: bool = False,
    squash: tuple[int, int] = (0, 1),
) -> torch.Tensor:
    """As :func:`freetoken.kernels.small_gemm.reference.linear` for contiguous ``x [M, K]`` with M from 0 to 32.

    ``squash`` are R and S of :func:`freetoken.kernels.small_gemm.reference.linear_squashed` (R 0 for none).
    ``under`` says that the kernel launched right before is ``LATE``, none of these, and not what makes x: see there.
    """
    n, k = weight.shape
    out = torch.empty((x.shape[0], n), dtype=out_dtype or x.dtype, device=x.device)
    if x.shape[0] > 0:
        wide = x.dtype == torch.float32
        config = config or pick_config(n, k, x.shape[0], launch.capability(x.device), wide=wide)
        _launch(x, weight, bias, out, False, config, scratch, under, squash)
    return out


def linear_silu_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    config: GemmConfig | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.small_gemm.reference.linear_silu_mul`, for M from 0 to 32."""
    n, k = weight.shape
    out = torch.empty((x.shape[0], n // 2), dtype=x.dtype, device=x.device)
    if x.shape[0] > 0:
        config = config or pick_config(n, k, x.shape[0], launch.capability(x.device), silu=True)
        _launch(x, weight, bias, out, True, config, scratch, False)
    return out


def reserve(scratch: Scratch, n: int, k: int, *, silu: bool, device: torch.device | str) -> None:
    """Size ``scratch`` for every M of a ``[n, k]`` weight."""
    halves = 2 if silu else 1
    for rows in sorted({m_class(m) for m in range(1, max_tokens(n) + 1)}):
        config = pick_config(n, k, rows, launch.capability(torch.device(device)), silu=silu)
        scratch.reserve(n // halves, config, rows, halves, device)

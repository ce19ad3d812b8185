"""Row ids of hashed n-grams: which rows of the PLE table each token looks up."""

from __future__ import annotations

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice, choose_op
from freetoken.kernels.ple_hash.index import TokenIndex, TokenIndexMemo
from freetoken.kernels.ple_hash.reference import row_ids_reference

__all__ = ["PleHash", "TokenIndex", "TokenIndexMemo", "can_fuse", "ple_row_ids", "row_ids_reference"]


def can_fuse(input_ids: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the kernel can address everything: the ids lie on a CUDA device, the rest on the same one, all contiguous."""
    tensors = (input_ids, *others)
    return input_ids.is_cuda and all(t.device == input_ids.device and t.is_contiguous() for t in tensors)


def _check_geometry(
    input_ids: torch.Tensor,
    context: torch.Tensor,
    index: tuple[torch.Tensor | None, torch.Tensor | None],
    constants: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads_per_ngram: int,
    out: torch.Tensor | None,
) -> None:
    """``ValueError`` for shapes that would make the kernel read or write elsewhere."""
    multipliers, sizes, offsets = constants
    if input_ids.dim() != 1 or multipliers.dim() != 1 or sizes.dim() != 1:
        raise ValueError("ple_hash: input_ids, multipliers and vocab_sizes must be one-dimensional")
    tokens, n, heads = input_ids.shape[0], multipliers.shape[0], sizes.shape[0]
    if n < 2 or heads_per_ngram < 1:
        raise ValueError(
            f"ple_hash: {n} multipliers and {heads_per_ngram} heads an n-gram; at least 2 and 1 are needed"
        )
    if context.dim() != 2 or context.shape[1] != n - 1 or not context.is_contiguous():
        raise ValueError(f"ple_hash: the context must be a contiguous [B, {n - 1}], not {list(context.shape)}")
    if heads != heads_per_ngram * (n - 1) or offsets.shape != sizes.shape:
        raise ValueError(
            f"ple_hash: {heads} head sizes and {list(offsets.shape)} offsets for {n - 1} orders of {heads_per_ngram} heads"
        )
    request, local = index
    if (request is None) != (local is None):
        raise ValueError("ple_hash: req_index and local_index are given together or not at all")
    if request is None or local is None:
        if context.shape[0] != tokens:
            raise ValueError(
                f"ple_hash: without an index {tokens} tokens need as many contexts, not {context.shape[0]}"
            )
    elif request.shape != (tokens,) or local.shape != (tokens,):
        raise ValueError(f"ple_hash: the index must have {tokens} entries")
    if out is not None and (out.shape != (tokens, heads) or out.dtype != torch.int64 or not out.is_contiguous()):
        raise ValueError(f"ple_hash: out must be a contiguous int64 [{tokens}, {heads}]")


class PleHash:
    """The op with its implementation bound once, for a model whose captured steps must not change their path."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice

    def __call__(
        self,
        input_ids: torch.Tensor,
        ngram_context: torch.Tensor,
        req_index: torch.Tensor | None,
        local_index: torch.Tensor | None,
        multipliers: torch.Tensor,
        vocab_sizes: torch.Tensor,
        offsets: torch.Tensor,
        *,
        eos_token_id: int,
        heads_per_ngram: int,
        max_len: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :func:`ple_row_ids`, by the implementation chosen when the model was built."""
        constants = (multipliers, vocab_sizes, offsets)
        _check_geometry(input_ids, ngram_context, (req_index, local_index), constants, heads_per_ngram, out)
        arguments = (input_ids, ngram_context, req_index, local_index, *constants)
        named = {"eos_token_id": eos_token_id, "heads_per_ngram": heads_per_ngram}
        # The output, too: the kernel would write through a pointer of another memory.
        placed = [tensor for tensor in (*arguments[1:], out) if tensor is not None]
        if self.choice.impl == "reference" or not can_fuse(input_ids, *placed):
            return row_ids_reference(*arguments, **named, max_len=max_len, out=out)
        from freetoken.kernels.ple_hash import triton

        if self.choice.impl != "check":
            return triton.row_ids(*arguments, **named, out=out)
        checking.refuse_capture("ple_hash", self.choice.flag)
        expected = row_ids_reference(*arguments, **named, max_len=max_len)
        actual = triton.row_ids(*arguments, **named, out=out)
        wrong = int((actual != expected).sum())
        if wrong:
            raise checking.KernelCheckError(f"ple_hash: {wrong} of {actual.numel()} row ids differ from the reference")
        return actual


def ple_row_ids(
    input_ids: torch.Tensor,
    ngram_context: torch.Tensor,
    req_index: torch.Tensor | None,
    local_index: torch.Tensor | None,
    multipliers: torch.Tensor,
    vocab_sizes: torch.Tensor,
    offsets: torch.Tensor,
    *,
    eos_token_id: int,
    heads_per_ngram: int,
    max_len: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row ids ``[T, H] int64`` of every token's n-grams, semantics as :func:`row_ids_reference`.

    ``input_ids [T]`` of any integer type; ``ngram_context [B, n - 1]`` contiguous, the ids before each request's first token of
    this call, oldest first; ``req_index`` and ``local_index [T]`` int32, the request of each token and its offset among the
    request's tokens of this call, both ``None`` for one token a request; ``multipliers [n]``, ``vocab_sizes`` and ``offsets [H]``
    int64. ``out [T, H]``, contiguous int64, is filled and returned where given. ``max_len`` is the longest request's number of
    tokens in this call: it spares the reference a read of the device.

    One kernel launch on CUDA, none for T = 0; nothing is read on the host, so a call can be captured. The kernel runs where
    everything lies contiguous on one CUDA device and ``FREETOKEN_PLE_FUSED_HASH``, read at each call, is not 0; else the reference does.
    Raises ``ValueError`` for a geometry that cannot be addressed.
    """
    return PleHash(choose_op("ple_hash", input_ids.device.type))(
        input_ids,
        ngram_context,
        req_index,
        local_index,
        multipliers,
        vocab_sizes,
        offsets,
        eos_token_id=eos_token_id,
        heads_per_ngram=heads_per_ngram,
        max_len=max_len,
        out=out,
    )

"""From a message to a request the scheduler can run, or a refusal that says what to change (torch-free)."""

from __future__ import annotations

from freetoken.errors import RequestError
from freetoken.messages import AddRequest
from freetoken.scheduler.radix import as_key
from freetoken.scheduler.request import Req
from freetoken.server_args import Config

_MASK = 2**64 - 1


def derive_seed(server_seed: int, arrival: int) -> int:
    """A seed in ``[0, 2**63)`` for the ``arrival``-th request of a server started with ``server_seed``.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014), so that neighbouring requests draw unrelated numbers.
    """
    z = (server_seed + (arrival + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def build_request(message: AddRequest, config: Config, pool_tokens: int, arrival: int, now: float) -> Req:
    """Check ``message`` and make its :class:`Req`.

    ``pool_tokens`` is what the whole KV pool holds. ``max_new_tokens`` is clipped to the context and to the pool, so that
    a request that runs alone always fits. Raises :class:`RequestError` (400) naming the field and the flag to change.
    """
    ids, sampling = message.ids, message.sampling
    limit = min(config.context_length, pool_tokens)
    _check_prompt(ids, config, pool_tokens)
    if sampling.n != 1:
        raise RequestError(f"the scheduler runs one sequence a request, not n={sampling.n}", param="n")
    sampling.check_vocabulary(config.model.vocab_size)
    room = limit - len(ids)
    wanted = room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens)
    eos = () if sampling.ignore_eos else config.model.eos_token_ids
    return Req(
        rid=message.rid,
        ids=list(ids),
        prompt_len=len(ids),
        sampling=sampling,
        max_new_tokens=wanted,
        stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
        seed=derive_seed(config.random_seed, arrival) if sampling.seed is None else sampling.seed,
        arrival=arrival,
        priority=_priority(message, config),
        arrival_time=now,
        key=as_key(ids),
    )


def _priority(message: AddRequest, config: Config) -> int:
    if message.priority and not config.priority_scheduling:
        raise RequestError(
            "priority needs --enable-priority-scheduling", param="priority", code="unsupported_parameter"
        )
    return message.priority


def check_queue(prompt_tokens: int, requests: int, queued_tokens: int, config: Config) -> None:
    """Raise :class:`RequestError` (503, ``queue_full``) when one more request of ``prompt_tokens`` is too much beside
    ``requests`` that run or wait, and ``queued_tokens`` prompt tokens that wait.

    Requests are counted as the HTTP process counts them: in a burst all of them wait before the first one runs. An empty
    queue takes any prompt: refusing it would make every retry fail as well.
    """
    limit = config.max_running_requests + config.max_queued_requests
    if requests >= limit:
        what = f"{requests} requests are here, the limit of --max-running-requests plus --max-queued-requests"
    elif queued_tokens and queued_tokens + prompt_tokens > config.max_queued_tokens:
        what = f"{queued_tokens} prompt tokens are waiting and --max-queued-tokens is {config.max_queued_tokens}"
    else:
        return
    raise RequestError(f"the queue is full: {what}", code="queue_full", status=503, retry_after=1)


def _check_prompt(ids: list[int], config: Config, pool_tokens: int) -> None:
    vocabulary = config.model.vocab_size
    if not ids:
        raise RequestError("the prompt is empty", param="prompt", code="empty_prompt")
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(
            f"the prompt holds token id {wrong}, but the vocabulary has {vocabulary} ids",
            param="prompt",
            code="invalid_token_id",
        )
    if len(ids) >= config.context_length:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and leaves no room for output in the context of "
            f"{config.context_length} tokens (--context-length)",
            param="prompt",
            code="context_length_exceeded",
        )
    if len(ids) + 1 > pool_tokens:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and the KV cache holds {pool_tokens}, output included; "
            "raise --max-total-tokens or --mem-fraction-static",
            param="prompt",
            code="kv_cache_exceeded",
        )

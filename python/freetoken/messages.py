"""Wire types between the HTTP process and the scheduler, their codec, and the sockets they travel on (torch-free)."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Union

import msgspec
import zmq

from freetoken.errors import StartupError
from freetoken.sampling_params import SamplingParams

# --- HTTP process -> scheduler ---------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag=True):
    """One sequence to generate. ``ids`` is the prompt; ``sampling.n`` is already spread by the sender (always 1 here).

    Among waiting requests higher ``priority`` goes first.
    """

    rid: str
    ids: list[int]
    sampling: SamplingParams
    priority: int = 0


class AbortRequest(msgspec.Struct, tag=True):
    """Stop one request, or with ``rid=None`` every request. Aborting an unknown or ended request does nothing."""

    rid: str | None = None


class FlushCache(msgspec.Struct, tag=True):
    """Empty the prefix cache; answered by :class:`ControlReply`."""

    call: int


class GetInfo(msgspec.Struct, tag=True):
    """Ask for the scheduler's live numbers; answered by :class:`ControlReply`."""

    call: int


class Profile(msgspec.Struct, tag=True):
    """Start (``start=True``) or stop the torch profiler, writing into ``folder``; answered by :class:`ControlReply`."""

    call: int
    start: bool
    folder: str = ""


class Shutdown(msgspec.Struct, tag=True):
    """Finish running requests if ``drain``, else abort them; then exit with code 0."""

    drain: bool = True


ToScheduler = Union[AddRequest, AbortRequest, FlushCache, GetInfo, Profile, Shutdown]

# --- scheduler -> HTTP process ---------------------------------------------------------------------------------------


class TokenLogprob(msgspec.Struct, array_like=True):
    """Log-probability (natural log) of ``id``, and the most likely alternatives as parallel lists, best first."""

    id: int
    logprob: float | None
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Finish(msgspec.Struct, array_like=True):
    """Why a request ended.

    ``kind`` is ``stop`` (``matched`` is the token id), ``length``, ``abort`` or ``error`` (``message``, ``status``,
    ``code`` and ``param`` say what and why).
    """

    kind: str
    matched: int | None = None
    message: str | None = None
    status: int = 500
    code: str = "internal_error"
    param: str | None = None


class RequestOutput(msgspec.Struct, array_like=True):
    """What one step gave one request. The message with ``finish`` set is the request's last, and there is exactly one.

    ``ids`` are the new tokens (a matched stop token is included, so that it is counted), ``completion_tokens`` the total
    so far, ``cached_tokens`` the prompt tokens taken from the prefix cache at first admission.
    """

    rid: str
    ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish: Finish | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    queue_seconds: float | None = None


class SchedulerStats(msgspec.Struct):
    """A snapshot of the scheduler for metrics, health and the batch line; counters grow from the start.

    The ``state_`` fields are about checkpoints of recurrent state: blocks of host memory and the bytes of one, prefix hits
    that restored one, and checkpoints given up for newer ones. The ``_step_ms`` fields are means over the last steps without
    and with prompt tokens.
    """

    running: int = 0
    queued: int = 0
    used_tokens: int = 0
    cached_pool_tokens: int = 0
    total_tokens: int = 0
    rows_used: int = 0
    rows_total: int = 0
    gen_throughput: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    steps: int = 0
    graph_replays: dict[str, int] = {}
    graph_misses: int = 0
    state_blocks_used: int = 0
    state_blocks_total: int = 0
    state_hits: int = 0
    state_evictions: int = 0
    state_block_bytes: int = 0
    decode_step_ms: float = 0.0
    prefill_step_ms: float = 0.0


class StepOutput(msgspec.Struct, tag=True):
    """All outputs of one step, and at times fresh statistics."""

    outputs: list[RequestOutput]
    stats: SchedulerStats | None = None


class Loading(msgspec.Struct, tag=True):
    """Progress of the start: ``phase`` in words, ``done`` of ``total`` in ``unit`` (``bytes``, ``graphs``, ...)."""

    phase: str
    done: int
    total: int
    unit: str = "bytes"


class Ready(msgspec.Struct, tag=True):
    """The scheduler serves. ``info`` is JSON-ready: what fits, which kernels run, sizes and reasons."""

    info: dict[str, object]


class Failed(msgspec.Struct, tag=True):
    """The scheduler cannot go on. ``reason`` is one sentence for clients, without anything of the inside; ``detail``, if
    there is more to say, one for the operator."""

    reason: str
    detail: str = ""


class ControlReply(msgspec.Struct, tag=True):
    """Answer to a control call, matched by ``call``."""

    call: int
    ok: bool
    message: str = ""
    info: dict[str, object] = {}
    stats: SchedulerStats | None = None


ToFrontend = Union[StepOutput, Loading, Ready, Failed, ControlReply]

_encoder = msgspec.msgpack.Encoder()
_to_scheduler = msgspec.msgpack.Decoder(ToScheduler)
_to_frontend = msgspec.msgpack.Decoder(ToFrontend)


def encode(message: ToScheduler | ToFrontend) -> bytes:
    """Message to bytes (MessagePack)."""
    return _encoder.encode(message)


def decode_to_scheduler(data: bytes) -> ToScheduler:
    """Bytes to a message for the scheduler; ``msgspec.DecodeError`` when malformed."""
    return _to_scheduler.decode(data)


def decode_to_frontend(data: bytes) -> ToFrontend:
    """Bytes to a message for the HTTP process; ``msgspec.DecodeError`` when malformed."""
    return _to_frontend.decode(data)


class Channel:
    """The pair of addresses of one launch, in a temporary folder of its own, so that servers never collide.

    The HTTP process creates it (:meth:`create`), binds both ends and removes the folder; the scheduler connects.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.requests_address = f"ipc://{os.path.join(folder, 'requests')}"
        self.outputs_address = f"ipc://{os.path.join(folder, 'outputs')}"

    @classmethod
    def create(cls) -> Channel:
        """A channel in a new folder; :class:`StartupError` when there can be none."""
        parent = tempfile.gettempdir()
        try:
            folder = tempfile.mkdtemp(prefix="freetoken-", dir=parent)
        except OSError as error:
            raise StartupError(f"cannot make a folder in {parent}: {error.strerror} (set TMPDIR)") from None
        channel = cls(folder)
        longest = max(len(os.fsencode(os.path.join(folder, name))) for name in ("requests", "outputs"))
        if longest > zmq.IPC_PATH_MAX_LEN:
            channel.remove()
            raise StartupError(f"the path {folder} is too long for a socket; set TMPDIR to a shorter one")
        return channel

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def frontend_sockets(self, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """``(push to scheduler, pull from scheduler)``, both bound and without a high-water mark."""
        return _socket(context, zmq.PUSH, self.requests_address, True), _socket(
            context, zmq.PULL, self.outputs_address, True
        )

    def scheduler_sockets(self, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """``(pull from frontend, push to frontend)``, both connected."""
        return _socket(context, zmq.PULL, self.requests_address, False), _socket(
            context, zmq.PUSH, self.outputs_address, False
        )

    def send_once(self, message: ToFrontend) -> None:
        """Send one last message to the frontend, from any thread of the scheduler's process, and wait until it is out or a
        second or two have passed."""
        context = zmq.Context()
        socket = _socket(context, zmq.PUSH, self.outputs_address, False)
        socket.setsockopt(zmq.SNDTIMEO, 1000)
        with contextlib.suppress(zmq.Again):
            socket.send(encode(message))
        context.destroy(linger=1000)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, bind: bool) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


def drain_socket(socket: zmq.Socket[bytes], limit: int = 10_000) -> Sequence[bytes]:
    """All frames waiting on a pull socket, without blocking."""
    frames: list[bytes] = []
    while len(frames) < limit:
        try:
            frames.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            break
    return frames

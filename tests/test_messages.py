"""Wire types: every message survives the codec, malformed bytes are refused, launches do not share a channel."""

from __future__ import annotations

import os
import stat

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from freetoken import messages as m
from freetoken.sampling_params import SamplingParams

SAMPLING = SamplingParams(
    max_new_tokens=5, temperature=0.3, logit_bias={3: -100.0, 7: 1.5}, stop=("a", "é"), stop_token_ids=(2,), seed=-1
)
TO_SCHEDULER = [
    m.AddRequest("r1", [1, 2, 3], SAMPLING),
    m.AddRequest("r2", [0], SamplingParams()),
    m.AbortRequest("r1"),
    m.AbortRequest(),
    m.FlushCache(4),
    m.GetInfo(5),
    m.Profile(6, True, "folder"),
    m.Profile(7, False),
    m.Shutdown(),
    m.Shutdown(drain=False),
]
OUTPUT = m.RequestOutput(
    "r1",
    [9, 10],
    3,
    2,
    1,
    finish=m.Finish("stop", matched=10),
    logprobs=[m.TokenLogprob(9, -0.5, [9, 1], [-0.5, -2.0]), m.TokenLogprob(10, None)],
    prompt_logprobs=[m.TokenLogprob(1, None)],
    queue_seconds=0.25,
)
TO_FRONTEND = [
    m.StepOutput([OUTPUT, m.RequestOutput("r2", [], 1, 0, 0)]),
    m.StepOutput([], m.SchedulerStats(running=2, graph_replays={"8": 3})),
    m.Loading("weights", 1, 2),
    m.Ready({"device": "cpu", "sizes": [1, 2], "nested": {"a": None}}),
    m.Failed("no memory"),
    m.Failed("the step failed", "no memory"),
    m.ControlReply(3, True, info={"x": 1}, stats=m.SchedulerStats(steps=9)),
]


@pytest.mark.parametrize("message", TO_SCHEDULER, ids=lambda x: type(x).__name__)
def test_to_scheduler_round_trip(message: m.ToScheduler) -> None:
    assert m.decode_to_scheduler(m.encode(message)) == message


@pytest.mark.parametrize("message", TO_FRONTEND, ids=lambda x: type(x).__name__)
def test_to_frontend_round_trip(message: m.ToFrontend) -> None:
    assert m.decode_to_frontend(m.encode(message)) == message


def test_every_message_type_is_covered() -> None:
    assert {type(x) for x in TO_SCHEDULER} == set(m.ToScheduler.__args__)
    assert {type(x) for x in TO_FRONTEND} == set(m.ToFrontend.__args__)


@given(st.lists(st.integers(0, 2**31 - 1)), st.text(max_size=40), st.integers(-(2**63), 2**63 - 1))
def test_any_ids_and_names(ids: list[int], rid: str, seed: int) -> None:
    message = m.AddRequest(rid, ids, SamplingParams(seed=seed))
    assert m.decode_to_scheduler(m.encode(message)) == message


@pytest.mark.parametrize("message", TO_FRONTEND, ids=lambda x: type(x).__name__)
def test_a_message_does_not_decode_as_the_other_direction(message: m.ToFrontend) -> None:
    with pytest.raises(msgspec.DecodeError):
        m.decode_to_scheduler(m.encode(message))


@given(st.binary(max_size=64))
def test_malformed_bytes_raise_a_decode_error(data: bytes) -> None:
    for decode in (m.decode_to_scheduler, m.decode_to_frontend):
        try:
            decode(data)
        except msgspec.DecodeError:
            continue


def test_truncated_messages_raise_a_decode_error() -> None:
    data = m.encode(TO_SCHEDULER[0])
    for size in range(len(data)):
        with pytest.raises(msgspec.DecodeError):
            m.decode_to_scheduler(data[:size])


def test_default_lists_are_not_shared() -> None:
    first, second = m.TokenLogprob(1, None), m.TokenLogprob(2, None)
    first.top_ids.append(5)
    assert second.top_ids == []
    assert m.SchedulerStats().graph_replays is not m.SchedulerStats().graph_replays


def test_channels_of_two_launches_are_apart_and_private() -> None:
    one, two = m.Channel.create(), m.Channel.create()
    try:
        assert one.folder != two.folder
        assert not {one.requests_address, one.outputs_address} & {two.requests_address, two.outputs_address}
        assert stat.S_IMODE(os.stat(one.folder).st_mode) == 0o700
        same = m.Channel(one.folder)
        assert (same.requests_address, same.outputs_address) == (one.requests_address, one.outputs_address)
    finally:
        one.remove()
        two.remove()
    assert not os.path.exists(one.folder)
    one.remove()


def test_frames_cross_in_order_and_stay_in_their_channel() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    one, two = m.Channel.create(), m.Channel.create()
    sockets: list[zmq.Socket[bytes]] = []
    try:
        push, pull = one.frontend_sockets(context)
        inbox, outbox = m.Channel(one.folder).scheduler_sockets(context)
        other_push, other_pull = two.frontend_sockets(context)
        other_inbox, other_outbox = m.Channel(two.folder).scheduler_sockets(context)
        sockets = [push, pull, inbox, outbox, other_push, other_pull, other_inbox, other_outbox]
        for number in range(100):
            push.send(m.encode(m.FlushCache(number)))
            outbox.send(m.encode(m.ControlReply(number, True)))
        calls: list[int] = []
        while len(calls) < 100:
            assert inbox.poll(5000)
            calls += [m.decode_to_scheduler(frame).call for frame in m.drain_socket(inbox, limit=7)]  # type: ignore[union-attr]
        assert calls == list(range(100))
        assert pull.poll(5000)
        assert m.decode_to_frontend(pull.recv()) == m.ControlReply(0, True)
        assert not other_inbox.poll(50)
        assert m.drain_socket(other_pull) == []
    finally:
        for socket in sockets:
            socket.close(0)
        context.term()
        one.remove()
        two.remove()

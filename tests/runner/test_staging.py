"""Packing of a step's host arrays into one copy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from freetoken.runner.staging import ALIGNMENT, HostRing, Layout

KINDS = [np.int64, np.int32, np.float32]


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(KINDS)), min_size=1, max_size=6), st.integers(0, 2**31))
def test_views_return_what_was_packed(shapes: list[tuple[int, type]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(-1000, 1000, count).astype(kind) for count, kind in shapes]
    layout = Layout.of(shapes)
    assert all(offset % ALIGNMENT == 0 for offset, _, _ in layout.parts)
    views = HostRing(torch.device("cpu")).upload(layout, arrays)
    for view, array in zip(views, arrays):
        np.testing.assert_array_equal(view.numpy(), array)


def test_later_uploads_leave_earlier_views_alone() -> None:
    ring = HostRing(torch.device("cpu"), depth=2)
    layout = Layout.of([(3, np.int64)])
    kept = [ring.upload(layout, [np.full(3, i)])[0] for i in range(7)]
    assert [int(v[0]) for v in kept] == list(range(7))


def test_upload_into_a_static_buffer_writes_in_place() -> None:
    ring = HostRing(torch.device("cpu"))
    layout = Layout.of([(2, np.int64), (2, np.int32)])
    static = torch.full((layout.size + 16,), 255, dtype=torch.uint8)
    views = layout.device_views(static)
    ring.upload(layout, [np.array([5, 6]), np.array([7, 8], dtype=np.int32)], target=static)
    assert views[0].tolist() == [5, 6] and views[1].tolist() == [7, 8]
    assert static[layout.size :].tolist() == [255] * 16

"""stable_topk against a sort in Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.kernels.topk import stable_topk

floats = st.sampled_from([0.0, -0.0, 1.0, -1.0, -1e-45, 1e-45, -math.inf, math.inf, -3.5, -3.4e38])


@given(st.lists(floats, min_size=1, max_size=40), st.data())
def test_ties_go_to_the_lower_column(row: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(row)))
    value, index = stable_topk(torch.tensor([row, row[::-1]]), count)
    for values, columns, source in zip(
        value.tolist(), index.tolist(), (row, row[::-1]), strict=True
    ):
        want = sorted(range(len(source)), key=lambda i: -torch.tensor(source[i]).item())[:count]
        assert columns == want
        assert values == [torch.tensor(source[i]).item() for i in want]


@pytest.mark.parametrize("width", [100, 5000])
def test_a_wide_row_of_equals(width: int) -> None:
    """torch.topk alone gives these columns in no order at all."""
    _, index = stable_topk(torch.zeros(3, width), 20)
    assert index.tolist() == [list(range(20))] * 3


def test_ties_above_the_last_one_in() -> None:
    """No tie decides who is in, only who comes first."""
    row = [0.0, 5.0, 1.0, 5.0, 4.0, 5.0, 4.0]
    value, index = stable_topk(torch.tensor([row]), 5)
    assert index.tolist() == [[1, 3, 5, 4, 6]]
    assert value.tolist() == [[5.0, 5.0, 5.0, 4.0, 4.0]]

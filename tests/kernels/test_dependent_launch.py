"""Overlapping kernels give the same bits as kernels one after the other, captured or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shared.kernels import dependent_launch
from shared.kernels.linear import linear, linear_addends, sum_addends
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernels.compile_kernels import waits_first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("num_rows", [1, 64, 100])
def test_chain_of_kernels_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, num_rows: int
) -> None:
    width, num_layers = 1024, 12

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size).to(device, torch.bfloat16)

    layers = [
        (normal(width, width) / 32, normal(8 * width, width) / 32, normal(width, 4 * width) / 64)
        for _ in range(num_layers)
    ]
    scale, start = normal(width), normal(num_rows, width)

    def forward() -> torch.Tensor:
        """Free every tensor as soon as it is read, so that the next ones get its memory."""
        x = start.clone()  # not a kernel but a copy
        normed = rms_norm(x, scale, 1e-5)
        for square, gate_up, down in layers:
            delta = sum_addends(linear_addends(normed, square), None, x.dtype)
            x, normed = add_rms_norm(x, linear_addends(delta, square), None, scale, 1e-5)
            inner = linear_swiglu(normed, gate_up)
            x, normed = add_rms_norm(x, linear_addends(inner, down), None, scale, 1e-5)
        return linear(normed, layers[0][0])

    monkeypatch.setattr(dependent_launch, "can_overlap", lambda device: False)
    expected = forward()
    monkeypatch.undo()
    for _ in range(20):
        assert torch.equal(forward(), expected)
    replay, out = captured(forward)
    for _ in range(20):
        out.zero_()
        replay()
        replay()  # the end of one graph and the beginning of the next
        assert torch.equal(out, expected)


def captured(compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    return graph.replay, out


@pytest.mark.parametrize(
    ("ptx", "is_first"),
    [
        ("ld.param.b64 %rd1; // .exit\n griddepcontrol.wait; ld.global.b32 %r1;", True),
        ("ld.global.b32 %r1; griddepcontrol.wait;", False),
        ("cp.async.bulk.tensor.2d [%r1]; griddepcontrol.wait;", False),
        ("@%p1 bra $L1; griddepcontrol.wait;", False),
        ("@%p1 ret; griddepcontrol.wait;", False),
        ("ld.global.b32 %r1; ret;", False),
    ],
)
def test_what_counts_as_waiting_first(ptx: str, *, is_first: bool) -> None:
    assert waits_first(ptx) == is_first


@pytest.mark.parametrize(
    ("ptx", "is_first"),
    [
        ("ld.global.b32 %r1; griddepcontrol.wait; st.global.b32 [%rd1], %r1;", True),
        ("st.global.b32 [%rd1], %r1; griddepcontrol.wait;", False),
        ("red.global.add.u32 [%rd1], %r1; griddepcontrol.wait;", False),
        ("@%p1 bra $L1; griddepcontrol.wait;", False),
    ],
)
def test_what_may_load_may_not_store_before_it_waits(ptx: str, *, is_first: bool) -> None:
    assert waits_first(ptx, may_load=True) == is_first

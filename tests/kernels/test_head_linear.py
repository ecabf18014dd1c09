"""Products head by head: against the reference, and a row's bits among others."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.dispatch import use_triton
from shared.kernels.head_linear import head_linear, head_linear_ref, head_weights
from shared.kernels.products_cpu import CpuProducts


def weights_of(tensor, device):
    return head_weights(CpuProducts(), tensor.to(device))


@pytest.mark.parametrize(("width_n", "width_k"), [(20, 24), (70, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_operands_match_the_reference(device, width_n, width_k, dtype):
    x = torch.randn(5, 3, width_k + 8, dtype=dtype, device=device)[..., :width_k]
    weight = torch.randn(3, width_n, width_k, dtype=dtype)
    out = torch.full((5, 3, width_n + 4), torch.nan, dtype=dtype, device=device)
    want = torch.empty(5, 3, width_n, dtype=torch.float64)
    head_linear(x, weights_of(weight, device), out[..., 4:])
    head_linear_ref(x.cpu(), weight, want)
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(out[..., 4:].cpu().double(), want, rtol=0, atol=tolerance)
    assert out[..., :4].isnan().all()


def test_a_row_has_the_same_bits_among_any_others(device):
    dtypes = [torch.float32] if not torch.cuda.is_available() else [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        x = torch.randn(150, 2, 96, device=device).to(dtype)
        weights = weights_of(torch.randn(2, 80, 96).to(dtype), device)

        def multiply(rows, weights=weights, dtype=dtype):
            out = torch.empty(len(rows), 2, 80, dtype=dtype, device=device)
            head_linear(rows, weights, out)
            return out

        alone = multiply(x[7:8])[0]
        for count in (9, 40) if use_triton(x) and not x.is_cuda else (9, 17, 33, 64, 150):
            assert torch.equal(multiply(x[:count])[7], alone), count
        assert torch.equal(multiply(x[:40].flip(0))[32], alone)


def test_no_rows(device):
    out = torch.empty(0, 2, 3, device=device)
    head_linear(torch.empty(0, 2, 4, device=device), weights_of(torch.ones(2, 3, 4), device), out)

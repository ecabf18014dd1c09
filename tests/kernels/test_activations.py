"""Activations of MLPs without a gate against transformers' in float64, and the bits of a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from transformers.activations import ACT2FN, XIELUActivation

from shared.kernels.activations import squared_relu, xielu

ALPHA_P, ALPHA_N, BETA, EPS = 0.7, -0.3, 0.5, -1e-6


def activate_xielu(x: torch.Tensor) -> torch.Tensor:
    def number(value: float) -> torch.Tensor:
        return torch.tensor([value], device=x.device)

    return xielu(
        x,
        of_square=functional.softplus(number(ALPHA_P)),
        of_exponential=BETA + functional.softplus(number(ALPHA_N)),
        of_value=number(BETA)[0],
        largest=number(EPS)[0],
    )


def xielu_of_transformers(x: torch.Tensor) -> torch.Tensor:
    module = XIELUActivation(beta=BETA, eps=EPS, dtype=torch.float64)
    module.alpha_p.data.fill_(ALPHA_P)
    module.alpha_n.data.fill_(ALPHA_N)
    return module(x).detach()


CASES = [
    pytest.param(squared_relu, ACT2FN["relu2"], id="relu2"),
    pytest.param(activate_xielu, xielu_of_transformers, id="xielu"),
]
Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(("activate", "want"), CASES)
def test_values_are_those_of_transformers(
    device: torch.device, activate: Function, want: Function
) -> None:
    x = torch.cat([torch.linspace(-30, 30, 999), torch.tensor([0.0, -1e-7, 1e-7, -1e30])])
    got = activate(x.to(device)).cpu().double()
    torch.testing.assert_close(got, want(x.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activate", [squared_relu, activate_xielu])
def test_bits_of_a_row_do_not_depend_on_the_batch(device: torch.device, activate: Function) -> None:
    x = (torch.randn(40, 1003) * 4).to(device)
    full = activate(x)
    for row in (0, 1, 17, 39):
        assert torch.equal(activate(x[row : row + 1].clone())[0], full[row])
    for count in (2, 3, 31):
        assert torch.equal(activate(x[:count].clone()), full[:count])

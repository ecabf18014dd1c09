"""Which kernel attends to latents on a GPU, and what happens where Triton lacks one of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import triton

import shared.kernels
from shared.kernels.latent_attention import hopper_kernel, suits_hopper

MODULE = "shared.kernels.latent_attention_kernels_hopper"
WIDTHS = {"value_width": 512, "tail": 64}


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the kernel be imported as in a new process, and again after the test."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.delattr(shared.kernels, MODULE.rpartition(".")[2], raising=False)
    hopper_kernel.cache_clear()
    yield
    hopper_kernel.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("value_width", "tail"), [(512, 64), (256, 32), (128, 16)])
def test_hopper_has_a_kernel_for_whole_blocks_of_16_bits(
    dtype: torch.dtype, value_width: int, tail: int
) -> None:
    assert suits_hopper(9, dtype, value_width, tail)


@pytest.mark.parametrize("capability", [8, 10, 12])
def test_other_gpus_have_the_plain_one(capability: int) -> None:
    assert not suits_hopper(capability, torch.bfloat16, **WIDTHS)


@pytest.mark.parametrize(
    ("dtype", "value_width", "tail"),
    [
        (torch.float32, 512, 64),
        (torch.bfloat16, 16, 8),
        (torch.bfloat16, 384, 64),
        (torch.bfloat16, 1024, 64),
        (torch.bfloat16, 512, 48),
        (torch.bfloat16, 512, 128),
    ],
)
def test_other_dtypes_and_widths_have_the_plain_one(
    dtype: torch.dtype, value_width: int, tail: int
) -> None:
    assert not suits_hopper(9, dtype, value_width, tail)


def test_the_kernel_of_hopper_is_there_with_this_triton(caplog: pytest.LogCaptureFixture) -> None:
    hopper_kernel.cache_clear()
    kernel = hopper_kernel()
    assert kernel is not None and kernel.__name__ == "_shared_latents_hopper_kernel"
    assert not caplog.records


@pytest.mark.parametrize(
    "missing",
    [
        "triton.experimental.gluon",
        "triton.experimental.gluon.jit",
        "triton.experimental.gluon.language.NVMMADistributedLayout",
        "triton.experimental.gluon.language.nvidia.hopper.warpgroup_mma",
    ],
)
@pytest.mark.usefixtures("not_imported")
def test_a_triton_that_lacks_something_has_the_plain_one_and_says_so_once(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if missing.endswith("gluon"):
        monkeypatch.setitem(sys.modules, missing, None)  # what Python makes an ImportError
    else:
        monkeypatch.delattr(missing)
    assert hopper_kernel() is None and hopper_kernel() is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and triton.__version__ in record.message
    assert missing.rpartition(".")[2] in record.message


def test_nothing_of_it_is_imported_before_a_gpu_asks_for_it() -> None:
    code = (
        "import sys, shared.models.llama, shared.kernels.latent_attention\n"
        f"assert not {{'triton.experimental.gluon', '{MODULE}'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)

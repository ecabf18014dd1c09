"""A target on a CPU whose BLAS is inexact finds out at start-up, says so, and serves exactly."""

from __future__ import annotations

import logging

import pytest

from shared.kernels import products_cpu
from shared.messages import SamplingParams, TreeShape
from target_service import self_test
from tests.engines import Models, make_draft, make_target, run_plain
from tests.local_pair import LocalPair, LocalRequest
from tests.vendor_blas import PlaceSensitiveBatches, PlaceSensitiveBlas


def requests() -> list[LocalRequest]:
    return [
        LocalRequest(
            prompt=[3 + seed, 5, 8, 13 + seed],
            max_new_tokens=24,
            shape=TreeShape(num_steps=5, topk=4, num_draft_tokens=16),
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        for seed, temperature in enumerate((0.0, 1.0))
    ]


@pytest.fixture
def _inexact_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every library of this process one whose bits depend on places."""
    monkeypatch.setattr(products_cpu, "OneDnn", PlaceSensitiveBlas)
    monkeypatch.setattr(products_cpu, "Blas", PlaceSensitiveBlas)
    monkeypatch.setattr(products_cpu, "BatchLibrary", PlaceSensitiveBatches)


@pytest.mark.usefixtures("_inexact_platform")
def test_an_inexact_platform_is_served_exactly_and_said(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pairing = models.pairing("standalone")
    target = make_target(pairing, self_test=True)
    assert "exactness: rows of a BLAS that minds places's products" in caplog.text
    assert "exactness: weights are multiplied by elementwise, attention by elementwise" in (
        caplog.text
    )
    assert "agree bit for bit" in caplog.text and "EXACTNESS IS OFF" not in caplog.text
    speculated = requests()
    LocalPair(target, make_draft(pairing)).run(speculated)
    assert max(request.accept_length for request in speculated) > 1
    for plain, request in zip(run_plain(target, speculated), speculated, strict=True):
        assert request.output == plain.output


@pytest.mark.usefixtures("_inexact_platform")
def test_what_the_probes_miss_the_comparison_finds(
    models: Models, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "settle_products", lambda *_: None)
    make_target(models.pairing("standalone"), self_test=True)
    assert "everything is multiplied by elementwise arithmetic from now on" in caplog.text
    assert "EXACTNESS IS OFF" not in caplog.text


def test_weights_of_a_target_are_probed_at_their_loaded_shapes(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = []
    real = self_test.settle_products

    def settle(products: products_cpu.CpuProducts, heads: tuple[int, int, int]) -> None:
        probed.append(({tuple(weight.shape) for weight in products.weights}, heads))
        real(products, heads)

    monkeypatch.setattr(self_test, "settle_products", settle)
    target = make_target(models.pairing("standalone"), self_test=True)
    config = target.runner.model.config
    ((shapes, heads),) = probed
    hidden, q_width = config.hidden_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    assert shapes == {
        (q_width + 2 * kv_width, hidden),
        (hidden, q_width),
        (2 * config.intermediate_size, hidden),
        (hidden, config.intermediate_size),
        (config.vocab_size, hidden),
    }
    group, head_dim = config.num_heads // config.num_kv_heads, config.head_dim
    assert heads == (group, head_dim, head_dim)

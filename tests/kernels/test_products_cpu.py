"""A CPU's products: right, and bitwise a function of a row alone, however they are computed.

Which libraries keep that is the platform's: what they are asked is the probe's verdict, and that
the verdict is right. What must hold on every CPU is asked of elementwise products.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels import dispatch
from shared.kernels.linear import linear
from shared.kernels.probe_cpu import probe_batches, probe_weight, settle_products
from shared.kernels.products_cpu import (
    BatchLibrary,
    Blas,
    CpuProducts,
    CpuWeight,
    Elementwise,
    ElementwiseBatches,
    OneDnn,
    ProductLibrary,
)
from shared.kernels.tree_attention_cpu import tree_attention_cpu
from shared.kernels.tree_attention_metadata import AttentionParams
from tests.kernels.attention_cases import exact, pack, random_block
from tests.vendor_blas import AddressSensitiveBlas, PlaceSensitiveBatches, PlaceSensitiveBlas

LIBRARIES: tuple[ProductLibrary, ...] = (
    *(library for library in (OneDnn(), Blas()) if library.is_available()),
    Elementwise(),
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Narrow, odd, around the sizes of vectors and tiles.
WIDTHS = st.one_of(st.integers(1, 16), st.sampled_from([17, 31, 33, 64, 65, 80, 129, 257]))


def products_of(library: ProductLibrary) -> CpuProducts:
    return CpuProducts([library])


def settled(library: ProductLibrary, weight: torch.Tensor) -> CpuWeight:
    """Return a weight as a worker would multiply by it after its self-test."""
    products = products_of(library)
    packed = products.weight(weight)
    assert isinstance(packed, CpuWeight)
    settle_products(products, (4, 16, 16))
    return packed


@pytest.mark.parametrize(
    "library", [x for x in LIBRARIES if not isinstance(x, Blas)], ids=lambda library: library.name
)
def test_a_way_that_passes_the_probe_is_kept(library: ProductLibrary) -> None:
    """Elementwise products always pass; oneDNN does wherever it has been seen."""
    for shape in ((1, 5), (33, 257), (256, 512)):
        products = products_of(library)
        packed = products.weight(torch.randn(shape))
        assert isinstance(packed, CpuWeight) and probe_weight(packed)
        settle_products(products, (4, 16, 16))
        assert products.linear is library or products.linear.is_invariant


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are a CPU's own products, which interpreted kernels stand in for."""
    monkeypatch.setattr(dispatch, "is_interpreted", lambda: False)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    width_n=WIDTHS,
    width_k=WIDTHS,
    num_rows=st.integers(1, 20),
    offset=st.integers(0, 15),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_a_row_has_its_bits_at_every_place_and_address(
    library: ProductLibrary,
    width_n: int,
    width_k: int,
    num_rows: int,
    offset: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((width_n, width_k), generator=generator).to(dtype)
    packed = settled(library, weight)
    row = torch.randn((1, width_k), generator=generator).to(dtype)
    alone = linear(row, packed, out_dtype=torch.float32)
    expected = row.double() @ weight.double().T
    torch.testing.assert_close(alone.double(), expected, rtol=1e-5, atol=1e-4)
    flat = torch.full((offset + num_rows * width_k,), torch.nan, dtype=dtype)[offset:]
    equal = flat.view(num_rows, width_k)
    equal[:] = row
    assert torch.equal(linear(equal, packed, out_dtype=torch.float32), alone.expand(num_rows, -1))
    place = seed % num_rows
    others = torch.randn((num_rows, 2 * width_k), generator=generator).to(dtype)[:, ::2]
    others[place] = row
    assert torch.equal(linear(others, packed, out_dtype=torch.float32)[place], alone[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_weight_is_the_same_after_it_was_packed_anew(
    library: ProductLibrary, dtype: torch.dtype
) -> None:
    weight, x = torch.randn(13, 37).to(dtype), torch.randn(5, 37).to(dtype)
    products = products_of(library)
    packed = products.weight(weight)
    assert isinstance(packed, CpuWeight)
    packed.multiply(x)
    products.give_up_libraries()
    assert products.is_invariant
    expected = CpuWeight(weight, CpuProducts([], [])).multiply(x)
    assert torch.equal(packed.multiply(x), expected)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_two_threads_give_a_row_its_bits_at_every_place(library: ProductLibrary) -> None:
    """Wide enough to be cut between threads; after the probe, on as many threads as it had."""
    torch.set_num_threads(2)
    try:
        packed = settled(library, torch.randn(1024, 768))
        row = torch.randn(1, 768)
        alone = packed.multiply(row)
        for count in (2, 8, 19, 64):
            assert torch.equal(packed.multiply(row.expand(count, -1)), alone.expand(count, -1))
    finally:
        torch.set_num_threads(1)


def test_elementwise_bits_do_not_depend_on_zeros_behind() -> None:
    """Nor do they on outputs beside: a padded or inflated model computes the same."""
    weight, x = torch.randn(20, 48), torch.randn(3, 48)
    wide_weight, wide_x = torch.randn(300, 700), torch.zeros(3, 700)
    wide_weight[:20, :48], wide_x[:, :48] = weight, x
    narrow = CpuWeight(weight, CpuProducts([])).multiply(x)
    assert torch.equal(CpuWeight(wide_weight, CpuProducts([])).multiply(wide_x)[:, :20], narrow)


@pytest.mark.parametrize("shape", [(3, 33), (5, 80), (33, 257), (256, 512)])
def test_the_probe_catches_a_product_that_minds_places(
    shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(shape)
    products = products_of(PlaceSensitiveBlas())
    packed = products.weight(weight)
    assert isinstance(packed, CpuWeight)
    assert not probe_weight(packed)
    settle_products(products, (4, 16, 16))
    assert "exactness: rows of a BLAS that minds places's products" in caplog.text
    assert products.linear.is_invariant and probe_weight(packed)
    expected = CpuWeight(weight, CpuProducts([])).multiply(weight[:1])
    assert torch.equal(packed.multiply(weight[:1]), expected)


def test_products_that_mind_addresses_see_none_but_aligned_ones() -> None:
    packed = products_of(AddressSensitiveBlas()).weight(torch.randn(24, 200))
    assert isinstance(packed, CpuWeight)
    row = torch.randn(1, 200)
    alone = packed.multiply(row)
    for offset in range(1, 16):
        x = torch.zeros(offset + 1600)[offset:].view(8, 200)
        x[:] = row
        assert x.data_ptr() % 64
        assert torch.equal(packed.multiply(x)[:1], alone)

    library, held = AddressSensitiveBlas(), torch.randn(64, 200)
    assert not torch.equal(library.multiply_tile(x, held), library.multiply_tile(x.clone(), held))


@pytest.mark.parametrize(("group", "head_dim"), [(1, 17), (4, 128), (7, 80)])
def test_the_probe_catches_batches_that_mind_places(
    group: int, head_dim: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert not probe_batches(PlaceSensitiveBatches(), group, head_dim, head_dim)
    assert probe_batches(ElementwiseBatches(), group, head_dim, head_dim)
    products = CpuProducts(attention=[PlaceSensitiveBatches()])
    settle_products(products, (group, head_dim, head_dim))
    assert products.attention.is_invariant
    assert "attention is multiplied by elementwise arithmetic" in caplog.text


@pytest.mark.parametrize("library", [BatchLibrary(), ElementwiseBatches()], ids=lambda x: x.name)
@pytest.mark.parametrize("head_dim", [16, 17, 20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_attention_is_right_in_every_way(library: BatchLibrary, group: int, head_dim: int) -> None:
    heads = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim}
    blocks = [
        random_block(70, (-1, 0, 0, 1), **heads),
        random_block(3, 11, **heads),
        random_block(130, 1, **heads),
        random_block(0, (-1, 0), **heads),
    ]
    batch = pack(blocks, page_size=4, device=torch.device("cpu"))
    products = CpuProducts(attention=[library])
    settle_products(products, (group, head_dim, head_dim))
    outs = [
        tree_attention_cpu(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            batch.metadata,
            AttentionParams(scale=0.2),
            products=products,
        )
        for _ in range(2)
    ]
    torch.testing.assert_close(outs[0].double(), exact(batch, 0.2), rtol=0, atol=2e-5)
    assert torch.equal(outs[0], outs[1])

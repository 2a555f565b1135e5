"""bfloat16 products: the exact ones, rounded once, whatever the shape, and whatever rows are beside a row."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 11, 80, 131])
@pytest.mark.parametrize(("outputs", "features"), [(64, 64), (33, 48), (1, 16), (2, 32), (400, 3072)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_the_exact_one_rounded_once(rows: int, outputs: int, features: int, bias: bool) -> None:
    import torch

    from belayer.engine.backends import bfloat16_linear

    if not bfloat16_linear.prepare():
        pytest.skip("no compiler or no AVX2 here")
    source = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, features, generator=source).bfloat16() for n in (rows, outputs))
    offset = torch.randn(outputs, generator=source).bfloat16() if bias else None
    assert bfloat16_linear.suits(x, weight)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    got = bfloat16_linear.bfloat16_linear(x, weight, offset)
    assert got.dtype is torch.bfloat16 and got.shape == exact.shape
    assert (got.double() - exact).abs().le(exact.abs() * 2**-8 + 1e-4).all()
    assert torch.equal(got, bfloat16_linear.bfloat16_linear(x, weight, offset))
    for first, last in ((0, 1), (rows // 2, rows // 2 + 2), (rows - 1, rows)):
        assert torch.equal(got[first:last], bfloat16_linear.bfloat16_linear(x[first:last], weight, offset))


def test_what_is_not_a_number_stays_so() -> None:
    import torch

    from belayer.engine.backends import bfloat16_linear

    if not bfloat16_linear.prepare():
        pytest.skip("no compiler or no AVX2 here")
    weight = torch.ones(4, 16).bfloat16()
    x = torch.ones(2, 16).bfloat16()
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    got = bfloat16_linear.bfloat16_linear(x, weight)
    assert got[0].isnan().all() and (got[1] == float("inf")).all()


def test_other_shapes_and_types_are_left_to_torch() -> None:
    import torch

    from belayer.engine.backends import bfloat16_linear

    bfloat16_linear.prepare()
    half, wide = torch.ones(2, 16).bfloat16(), torch.ones(2, 16)
    assert not bfloat16_linear.suits(wide, wide)
    assert not bfloat16_linear.suits(torch.ones(2, 24).bfloat16(), torch.ones(4, 24).bfloat16())
    assert not bfloat16_linear.suits(torch.ones(2, 32).bfloat16()[:, ::2], half)

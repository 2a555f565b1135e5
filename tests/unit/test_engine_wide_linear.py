"""bfloat16 products through float32: as exact as one rounding allows, for every shape."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]


@pytest.mark.parametrize("rows", [1, 5, 6, 80])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_the_exact_one_rounded_once(rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch):
    import torch

    from belayer.engine.backends import bfloat16_linear, wide_linear

    monkeypatch.setattr(bfloat16_linear, "_kernel", False)  # as where no kernel can be had
    monkeypatch.setattr(wide_linear, "BLOCK", 64 * 10)  # several blocks, the last one short
    source = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 64, generator=source).bfloat16() for n in (rows, 33))
    offset = torch.randn(33, generator=source).bfloat16() if bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    got = wide_linear.linear_through_float32(x, weight, offset)
    assert got.dtype is torch.bfloat16 and got.shape == (rows, 33)
    if rows >= wide_linear.FEWEST_ROWS:
        assert (got.double() - exact).abs().le(exact.abs() * 2**-8 + 1e-4).all()

    weight.zero_()  # nothing was packed away
    again = wide_linear.linear_through_float32(x, weight, offset)
    assert torch.equal(again, torch.zeros_like(again) if offset is None else offset.expand(rows, 33))

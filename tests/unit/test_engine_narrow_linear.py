"""bfloat16 products of a few rows: the exact ones, rounded once, whatever the shape."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM backend"),
]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 11, 32])
@pytest.mark.parametrize(("outputs", "features"), [(64, 64), (33, 48), (1, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_the_exact_one_rounded_once(rows: int, outputs: int, features: int, bias: bool) -> None:
    import torch

    from belayer.engine.backends.vllm import narrow_linear

    if not narrow_linear.prepare():
        pytest.skip("no compiler or no AVX2 here")
    source = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, features, generator=source).bfloat16() for n in (rows, outputs))
    offset = torch.randn(outputs, generator=source).bfloat16() if bias else None
    assert narrow_linear.suits(x, weight)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    got = narrow_linear.narrow_linear(x, weight, offset)
    assert got.dtype is torch.bfloat16 and got.shape == exact.shape
    assert (got.double() - exact).abs().le(exact.abs() * 2**-8 + 1e-4).all()
    assert torch.equal(got, narrow_linear.narrow_linear(x, weight, offset))
    # a row does not depend on those beside it
    assert torch.equal(got[:1], narrow_linear.narrow_linear(x[:1], weight, offset))


def test_what_is_not_a_number_stays_so() -> None:
    import torch

    from belayer.engine.backends.vllm import narrow_linear

    if not narrow_linear.prepare():
        pytest.skip("no compiler or no AVX2 here")
    weight = torch.ones(4, 16).bfloat16()
    x = torch.ones(2, 16).bfloat16()
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    got = narrow_linear.narrow_linear(x, weight)
    assert got[0].isnan().all() and (got[1] == float("inf")).all()


def test_other_shapes_and_types_are_left_to_torch() -> None:
    import torch

    from belayer.engine.backends.vllm import narrow_linear

    narrow_linear.prepare()
    half, wide = torch.ones(2, 16).bfloat16(), torch.ones(2, 16)
    assert not narrow_linear.suits(wide, wide)
    assert not narrow_linear.suits(torch.ones(2, 24).bfloat16(), torch.ones(4, 24).bfloat16())
    assert not narrow_linear.suits(torch.ones(33, 16).bfloat16(), half)
    assert not narrow_linear.suits(torch.ones(2, 32).bfloat16()[:, ::2], half)

"""The kernel of residual and norm without a GPU: its arithmetic under Triton's interpreter, and its compilation."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
triton = pytest.importorskip("triton", reason="Triton is not installed: the kernel was NOT run under its interpreter")

from tests.triton_interpreter import interpreted, refusals_of  # noqa: E402

SHAPES = [(5, 96), (3, 1000), (2, 1152), (1, 7), (3, 1024)]
DTYPES = ("float32", "float16", "bfloat16")


def cases() -> list[dict[str, Any]]:
    """Run under the interpreter."""
    return [
        case(shape, getattr(torch, dtype), bias, add)
        for shape in SHAPES
        for dtype in DTYPES
        for bias in (True, False)
        for add in (True, False)
    ]


def case(shape: tuple[int, int], dtype: Any, bias: bool, add: bool) -> dict[str, Any]:
    from model.cuda.residual_norm import NormWeights
    from model.cuda.residual_norm_kernel import residual_norm_triton

    generator = torch.Generator().manual_seed(shape[1])
    tokens, width = shape

    def draw(*size: int) -> Any:
        return torch.randn(*size, generator=generator).to(dtype)

    guard = 64
    buffers = [torch.full((tokens * width + 2 * guard,), float("nan"), dtype=dtype) for _ in range(2)]
    x, out = (buffer[guard:-guard].view(shape) for buffer in buffers)
    x.copy_(draw(*shape) * 3 + 5)
    delta, weight = draw(*shape), draw(width)
    norm = NormWeights(weight, draw(width) if bias else None, 1e-5)
    total = x.double() + delta.double() if add else x.double()
    residual_norm_triton(x, delta if add else None, norm, out)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True) if bias else wide
    want = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    if norm.bias is not None:
        want = want + norm.bias.double()
    spacing = torch.finfo(dtype).eps
    # The interpreter truncates where a GPU rounds fp32 to bf16: a whole spacing there. To it fp32's own error of the
    # statistics is added (means of 5 and deviations of 3: a few 1e-7 of the value before the weights).
    share = spacing * (1.004 if dtype == torch.bfloat16 else 0.502)
    allowed = share * want.abs() + 4e-6 * (weight.double().abs() + 1)
    return {
        "name": f"{shape} {dtype} bias={bias} add={add}",
        "sum": float(((x.double() - total).abs() / (share * total.abs() + 1e-30)).max()),
        "norm": float(((out.double() - want).abs() / allowed).max()),
        "guards": all(bool(b[:guard].isnan().all()) and bool(b[-guard:].isnan().all()) for b in buffers),
    }


def refusals() -> list[str]:
    """What the launcher says to tensors that the kernel would read past."""
    from model.cuda.residual_norm import NormWeights
    from model.cuda.residual_norm_kernel import residual_norm_triton

    x, norm = torch.zeros(4, 8), NormWeights(torch.ones(8), None, 1e-5)
    wrong = [
        (x, torch.zeros(4, 9), x.clone()),
        (x, None, torch.zeros(4, 8, dtype=torch.float16)),
        (torch.zeros(8, 4).t(), None, x.clone()),
        (x, torch.zeros(4, 16)[:, ::2], x.clone()),
    ]
    said = refusals_of(lambda x, delta, out: residual_norm_triton(x, delta, norm, out), wrong)
    residual_norm_triton(torch.empty(0, 8), None, norm, torch.empty(0, 8))  # no token is no launch
    return said


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return interpreted("tests.model.test_fast_norm_kernel", "cases", "refusals")


def test_every_case_is_within_rounding_of_float64(results: dict[str, Any]):
    found = results["cases"]
    assert len(found) == len(SHAPES) * len(DTYPES) * 4
    assert [entry["name"] for entry in found if not (entry["sum"] <= 1 and entry["norm"] <= 1)] == []
    # a tolerance that no case comes near to would hide a fault
    for dtype in ("float16", "bfloat16"):
        assert max(entry["norm"] for entry in found if dtype in entry["name"]) > 0.5


def test_nothing_beside_the_rows_is_written(results: dict[str, Any]):
    assert [entry["name"] for entry in results["cases"] if not entry["guards"]] == []


def test_what_the_kernel_would_misread_is_refused(results: dict[str, Any]):
    assert ["contiguous" in said for said in results["refusals"]] == [True] * 4


# -------------------------------------------------------------------------------------------------------- compilation


def compiled(capability: int, element: str, *, centred: bool, dependent: bool) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from model.cuda.residual_norm_kernel import COMPILE_OPTIONS, WARPS, residual_norm_kernel

    constants = {"WIDTH": 1152, "BLOCK": 2048, "DELTA": True, "CENTRED": centred, "DEPENDENT": dependent}
    types = dict.fromkeys(("x", "delta", "out", "weight", "bias"), f"*{element}") | {"eps": "fp32"}
    signature = {name: types.get(name, "constexpr") for name in residual_norm_kernel.arg_names}
    names = list(signature)
    source = ASTSource(
        residual_norm_kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in range(5)},
    )
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS, **COMPILE_OPTIONS}
    )


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing can be compiled under the interpreter")
@pytest.mark.parametrize(
    ("capability", "element"), [(80, "bf16"), (89, "fp16"), (90, "bf16"), (100, "fp16"), (120, "bf16")]
)
def test_compiles_for_every_generation(capability: int, element: str, own_triton_cache: None):
    dependent = capability >= 90
    for centred in (True, False):
        text = compiled(capability, element, centred=centred, dependent=dependent).asm["ptx"]
        assert f".target sm_{capability}" in text
        # rounded to the type it is compiled for, twice: the sum and the norm
        assert text.count(f"cvt.rn.{element.replace('fp', 'f')}") >= 2
        assert text.count("griddepcontrol.wait") == text.count("griddepcontrol.launch_dependents") == int(dependent)

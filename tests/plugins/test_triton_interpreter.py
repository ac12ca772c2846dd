"""The kernel's arithmetic and addressing on a CPU, under Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("triton", reason="Triton is not installed: the kernel was NOT run under its interpreter")

from tests.triton_interpreter import interpreted

# Half an ulp for rounding to the output's type; fp32 computes two products and a sum, so up to 1.5 ulp of its own.
# The interpreter truncates where a GPU rounds fp32 to bf16: a whole ulp there, plus what fp32 arithmetic adds to it.
ALLOWED_ULP = {"float32": 1.5, "float16": 0.501, "bfloat16": 1.001}


@pytest.fixture(scope="module")
def results():
    return interpreted("tests.plugins.triton_interpreter_cases", "cases")["cases"]


@pytest.mark.slow
def test_every_case_is_within_rounding_of_float64(results):
    assert len(results) == 3 * 7 + 6 + 5
    wrong = [case for case in results if not case["ulp"] <= ALLOWED_ULP[case["dtype"]]]
    assert not wrong
    # a tolerance that no case comes near to would hide a fault
    for dtype, allowed in ALLOWED_ULP.items():
        assert max(case["ulp"] for case in results if case["dtype"] == dtype) > 0.3 * allowed


def test_outputs_are_contiguous_and_of_the_type_of_the_input(results):
    assert all(case["contiguous"] for case in results)
    assert all(case["output_dtype"] == case["dtype"] for case in results)


def test_nothing_beside_the_output_is_written(results):
    guarded = {case["name"]: case["guards"] for case in results if "guards" in case}
    assert guarded == {"given outputs": True, "in place": True, "in slices": True}

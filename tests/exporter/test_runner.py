"""From a backend and a golden set to a verdict: faults of whole outputs (pitfalls 2, 4 to 6, 9, 10)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from exporter.errors import BadInput, Usage
from exporter.validation.backends import CaseSkippedError, OrtBackend, RunCrashedError
from exporter.validation.evidence import Profile, Shape
from exporter.validation.gate import Verdict, judge
from exporter.validation.golden import open_golden
from exporter.validation.golden_writer import write_golden
from exporter.validation.runner import compare
from tests.exporter.samples import (
    DTYPES,
    ORT,
    SHA,
    TORCH,
    WRONG,
    ArrayBackend,
    origin_of,
    tower,
    write_sample_golden,
    write_sample_onnx,
)


@pytest.fixture(scope="module", params=DTYPES)
def golden(request, tmp_path_factory):
    return open_golden(write_sample_golden(tmp_path_factory.mktemp("set") / "golden", request.param))


def verdict_of(golden, change=None, **options):
    return judge(compare(ArrayBackend(golden.header.dtype, change), golden, **options).evidence)


def test_an_honest_artifact_passes(golden):
    judgement = verdict_of(golden, weights_sha256=SHA)
    assert judgement.verdict is Verdict.PASS, judgement.faults + judgement.doubts
    assert judgement.counts.within == 6
    assert len(judgement.pairs) == 3


def constant_rows(output):
    return np.repeat(output[:1], len(output), axis=0) if len(output) > 1 else np.full_like(output, output.mean())


def with_nan(output):
    output[-1, -1] = np.nan
    return output


def with_infinity(output):
    output[0, 0] = np.inf
    return output


def with_zero_row(output):
    output[0] = 0
    return output


CHANGES = {
    "zeros": np.zeros_like,
    "constant": lambda y: np.full_like(y, 0.3),
    "one row everywhere": constant_rows,
    "x 1.5": lambda y: y * np.float32(1.5),
    "x 1.05": lambda y: y * np.float32(1.05),
    "negated": np.negative,
    "plus a constant": lambda y: y + np.float32(0.1),
    "rows permuted": lambda y: np.roll(y, 1, axis=0) if len(y) > 1 else np.roll(y, 1, axis=1),
    "columns permuted": lambda y: y[:, ::-1].copy(),
    "nan": with_nan,
    "all nan": lambda y: y * np.float32(np.nan),
    "infinity": with_infinity,
    "one row of zeros": with_zero_row,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_spoilt_output_fails_in_every_case(golden, change):
    judgement = verdict_of(golden, change)
    assert judgement.verdict is Verdict.FAILED
    assert judgement.counts.failed == judgement.counts.total == 6


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_model_fails_and_its_name_is_the_first_suspicion(golden, wrong):
    dtype = golden.header.dtype
    backend = ArrayBackend(dtype)
    backend.run = lambda pixels, grid_hws: tower(pixels, dtype, dtype, wrong)
    judgement = judge(compare(backend, golden).evidence)
    assert judgement.verdict is Verdict.FAILED
    suspicions = [fault for fault in judgement.faults if "points to" in fault and fault.startswith("case grid1-0")]
    assert f"points to {wrong};" in suspicions[0]


def test_a_fault_in_one_case_only_fails(golden):
    calls = []

    def fourth_is_scaled(output):
        calls.append(output)
        return output * np.float32(1.1) if len(calls) == 4 else output

    judgement = verdict_of(golden, fourth_is_scaled)
    assert judgement.verdict is Verdict.FAILED
    assert (judgement.counts.within, judgement.counts.failed) == (5, 1)


def test_a_selection_is_not_validated(golden):
    judgement = verdict_of(golden, only=["grid1-0", "grid1-1"])
    assert judgement.verdict is Verdict.NOT_VALIDATED
    assert (judgement.counts.within, judgement.counts.skipped) == (2, 4)
    assert verdict_of(golden, only=[]).verdict is Verdict.NOT_VALIDATED
    with pytest.raises(Usage, match="no golden case is called grid9"):
        verdict_of(golden, only=["grid1-0", "grid9"])


def test_a_selection_does_not_move_the_limits(golden):
    whole, part = verdict_of(golden), verdict_of(golden, only=["grid1-0"])
    assert whole.cases[2].checks == part.cases[2].checks


def test_another_scale_is_not_validated(golden):
    assert verdict_of(golden, limit_scale=2.0).verdict is Verdict.NOT_VALIDATED
    assert verdict_of(golden, limit_scale=0.99).verdict is not Verdict.PASS


def test_an_empty_golden_set_is_not_validated(tmp_path):
    with write_golden(tmp_path / "golden", origin_of("float32")):
        pass
    judgement = verdict_of(open_golden(tmp_path / "golden"))
    assert judgement.verdict is Verdict.NOT_VALIDATED
    assert judgement.counts.total == 0


def test_skips_and_crashes_are_counted(golden):
    def change(output):
        if len(output) == 1:
            raise CaseSkippedError("outside every profile")
        if len(output) == 14:
            raise RunCrashedError("signal 11")
        return output

    evidence = compare(ArrayBackend(golden.header.dtype, change), golden).evidence
    judgement = judge(evidence)
    assert judgement.verdict is Verdict.FAILED
    assert [case.status for case in evidence.cases] == ["skipped"] * 2 + ["compared"] * 2 + ["crashed"] * 2
    assert (judgement.counts.within, judgement.counts.failed, judgement.counts.skipped) == (2, 2, 2)
    assert "case grid2-0: signal 11" in judgement.faults


@pytest.mark.parametrize("change", [lambda y: y[:-1], lambda y: y[:, :-1], lambda y: y.T, lambda y: y[None]])
def test_an_output_of_another_shape_fails(golden, change):
    judgement = verdict_of(golden, change)
    assert judgement.verdict is Verdict.FAILED
    assert judgement.counts.failed == 6
    assert "the output has shape" in judgement.faults[0]


def test_an_output_that_ignores_the_input_is_seen_by_the_sensitivity(golden):
    """Every second input gets the first one's answer: each pair's distance is 0 instead of that of the reference."""
    previous = []

    def repeat(output):
        previous.append(output)
        return previous[-2] if len(previous) % 2 == 0 else output

    judgement = verdict_of(golden, repeat)
    assert [pair.check.measured for pair in judgement.pairs] == [0, 0, 0]
    assert judgement.verdict is Verdict.FAILED


def test_a_backend_is_not_compared_with_itself(golden):
    with pytest.raises(Usage, match="itself"):
        compare(ArrayBackend(golden.header.dtype, info=TORCH), golden)
    elsewhere = dataclasses.replace(TORCH, device="cuda", capability="9.0")
    assert judge(compare(ArrayBackend(golden.header.dtype, info=elsewhere), golden).evidence).verdict is Verdict.PASS


def test_another_dtype_or_other_weights_are_refused(golden):
    other = "float16" if golden.header.dtype == "bfloat16" else "bfloat16"
    with pytest.raises(BadInput, match="dtype"):
        compare(ArrayBackend(other), golden)
    with pytest.raises(BadInput, match="other weights"):
        compare(ArrayBackend(golden.header.dtype), golden, weights_sha256="ef" * 32)


def test_details_name_the_worst_token(golden):
    def one_row(output):
        output[len(output) // 2] *= np.float32(1.2)
        return output

    comparison = compare(ArrayBackend(golden.header.dtype, one_row), golden)
    assert [detail.name for detail in comparison.details] == [case.name for case in golden.header.cases]
    for detail, case in zip(comparison.details, golden.header.cases, strict=True):
        assert detail.tokens.worst_token == case.rows // 2
        assert sum(detail.tokens.histogram) == sum(detail.floor_histogram) == case.rows
        assert detail.seconds >= 0


def test_progress_and_profiles_are_passed_on(golden):
    seen = []
    profile = Profile("p", Shape(1, 4, 1), Shape(1, 56, 2), Shape(2, 324, 2))
    evidence = compare(
        ArrayBackend(golden.header.dtype), golden, profiles=[profile], progress=lambda *step: seen.append(step)
    ).evidence
    assert seen == [(case.name, index + 1, 6) for index, case in enumerate(golden.header.cases)]
    assert evidence.profiles == (profile,)
    assert evidence.reference == TORCH
    assert evidence.backend == ORT


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_onnx_file_passes_and_a_scaled_one_fails(tmp_path, dtype):
    golden = open_golden(write_sample_golden(tmp_path / "golden", dtype))
    for scale, verdict in ((1.0, Verdict.PASS), (1.05, Verdict.FAILED)):
        path = write_sample_onnx(tmp_path / f"{scale}.onnx", dtype, external=True, scale=scale)
        with OrtBackend(path, threads=1) as backend:
            judgement = judge(compare(backend, golden).evidence)
        assert judgement.verdict is verdict, (judgement.faults, judgement.doubts)

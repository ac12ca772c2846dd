"""The gate on the live tower's fast form on a real GPU, by golden sets that a CPU recorded."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: the live tower was NOT judged")

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU here: the live tower was NOT judged on hardware"),
]

from exporter.validation.golden import open_golden  # noqa: E402
from exporter.validation.judging import judge_file  # noqa: E402
from exporter.validation.record import GoldenOptions, record_golden  # noqa: E402
from exporter.validation.torch_backend import TorchBackend  # noqa: E402
from model.checkpoint import open_source  # noqa: E402

SETS = [
    ("tiny", "bfloat16", 700),
    ("tiny", "float16", 700),
    ("tiny-k3", "bfloat16", 700),
    # the gate wants a call of 300 patches for directions of wrong resampling; a CPU takes seconds for it
    ("kimi-k2.5?layers=2", "bfloat16", 330),
    ("kimi-k3?layers=2", "bfloat16", 330),
]


@pytest.mark.parametrize(("preset", "dtype", "patches"), SETS)
def test_the_fast_form_passes(preset, dtype, patches, tmp_path):
    source = f"random:{preset}"
    record_golden(open_source(source), GoldenOptions(dtype, packing="packed", max_patches=patches), tmp_path / "golden")
    with TorchBackend(source, dtype, "cuda") as backend:
        assert backend._tower.fast_tower() is not None
        report = judge_file(tmp_path / "tower", "tower", backend, open_golden(tmp_path / "golden"))
    assert report.judgement.verdict.value == "PASS", (*report.judgement.faults, *report.judgement.doubts)


def test_other_weights_fail(tmp_path):
    record_golden(open_source("random:tiny"), GoldenOptions("bfloat16", max_patches=700), tmp_path / "golden")
    with TorchBackend("random:tiny?seed=5", "bfloat16", "cuda") as backend:
        report = judge_file(tmp_path / "tower", "tower", backend, open_golden(tmp_path / "golden"))
    assert report.judgement.verdict.value == "FAILED"

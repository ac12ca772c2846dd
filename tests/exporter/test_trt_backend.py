"""An engine as a backend of the gate: what is lost with its process is one case, and is told."""

from __future__ import annotations

import dataclasses
import os
import time

import numpy as np
import pytest

from exporter import cli
from exporter.errors import BadInput, MissingRequirement
from exporter.files import FileRecord
from exporter.trt import backend as module
from exporter.trt.backend import EngineBackend, open_backend
from exporter.trt.child import Child
from exporter.trt.engine_worker import Lost, Opened, Ran, Refused
from exporter.validation.backends import CaseSkippedError, RunCrashedError
from exporter.validation.evidence import BackendInfo, Profile, Shape
from exporter.validation.latency import Latency, Percentiles, slow_cases
from tests.exporter import samples

THIS = "tests.exporter.test_trt_backend"
PROFILE = Profile("profile0", Shape(1, 4, 1), Shape(1, 16, 1), Shape(1, 64, 1))
INFO = BackendInfo("tensorrt", "10.13.2.6", "a GPU", capability="9.0")
ABORT, HANG, REFUSE, LOSE = 666.0, 667.0, 668.0, 669.0  # what the first pixel makes the stand-in do


def serve(connection):
    """Stands in for the process that has the engine: the output is the mean of each row's four patches."""
    connection.recv()
    connection.send(Opened(INFO, "float32", (PROFILE,), samples.SHA))
    part = Percentiles(1.0, 2.0, 3.0)
    while True:
        job = connection.recv()
        first = float(job.pixels.flat[0])
        if first == ABORT:
            os.abort()
        elif first == HANG:
            time.sleep(600)
        elif first == REFUSE:
            connection.send(Refused("no"))
        elif first == LOSE:
            connection.send(Lost("cudaMemcpyAsync: an illegal memory access (error 700)"))
        else:
            rows = job.pixels.mean(0).reshape(-1, 4, 588).mean(1)
            connection.send(Ran(rows.astype(np.float32), Latency(2, 10, part, part, part)))


@pytest.fixture
def opened(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "Child", lambda _function, name: Child(f"{THIS}:serve", name))
    monkeypatch.setattr(module, "_CASE_SECONDS", 5.0)
    with EngineBackend(tmp_path / "x.engine", "tensorrt") as engine:
        yield engine


def pixels(first=0.0, patches=16):
    values = np.random.default_rng(0).random((1, patches, 588), dtype=np.float32)
    values[0, 0, 0] = first
    return values


GRID = np.array([[4, 4]])


def test_it_says_what_runs_and_gives_numbers_and_times(opened):
    assert opened.describe() == INFO
    assert opened.latency() is None
    values = pixels()
    np.testing.assert_array_equal(opened.run(values, GRID), values.mean(0).reshape(-1, 4, 588).mean(1))
    assert opened.latency().gpu.p99 == 3.0


@pytest.mark.parametrize(
    ("first", "text"),
    [(ABORT, "SIGABRT"), (HANG, "no answer within 5 s"), (LOSE, "illegal memory access")],
)
def test_a_lost_process_costs_one_case(opened, first, text):
    opened.run(pixels(), GRID)
    with pytest.raises(RunCrashedError, match=text):
        opened.run(pixels(first), GRID)
    assert opened.latency() is None
    assert opened.run(pixels(), GRID).shape == (4, 588)  # in a new process


def test_what_it_does_not_take_is_skipped(opened):
    with pytest.raises(CaseSkippedError, match="no"):
        opened.run(pixels(REFUSE), GRID)
    with pytest.raises(CaseSkippedError, match=r"256 patches, where this engine takes 4 to 64"):
        opened.run(pixels(patches=256), np.array([[16, 16]]))


def test_an_engine_that_crashes_when_it_is_loaded_is_bad_input(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "Child", lambda _function, name: Child("tests.exporter.test_trt_child:abort", name))
    with pytest.raises(BadInput, match=r"x\.engine cannot be loaded: .*SIGABRT"):
        EngineBackend(tmp_path / "x.engine", "tensorrt")


def test_profiles_of_the_engine_must_be_those_of_its_manifest(monkeypatch, tmp_path):
    from tests.exporter.fake_gpu import fake_flavor

    monkeypatch.setattr(module, "Child", lambda _function, name: Child(f"{THIS}:serve", name))
    monkeypatch.setattr(module, "check_place", lambda *_: fake_flavor(None))
    (tmp_path / "vision_tower.engine").write_bytes(b"vtrt")
    right = samples.manifest_of(tmp_path, "engine", profiles=(dataclasses.replace(PROFILE, name="images"),))
    with pytest.raises(BadInput, match=r"vision_tower\.engine was replaced"):
        open_backend(tmp_path, right)  # the stand-in says that it loaded other bytes
    loaded = {"vision_tower.engine": FileRecord(samples.SHA, 4)}
    right = dataclasses.replace(right, files=loaded)
    open_backend(tmp_path, right).close()
    wrong = dataclasses.replace(PROFILE, max=Shape(1, 128, 1))
    with pytest.raises(BadInput, match="other profiles than its manifest says"):
        open_backend(tmp_path, dataclasses.replace(right, profiles=(wrong,)))


def test_without_a_gpu_a_bare_engine_is_no_verdict(tmp_path, capsys):
    """The real process, with TensorRT-RTX or without any: one line, exit code 8."""
    if module.cuda_capability() is not None:
        pytest.skip("there is a GPU here")
    path = tmp_path / "x.engine"
    path.write_bytes(b"vtrt")
    with pytest.raises(MissingRequirement, match=r"cuda-bindings|no usable CUDA GPU"):
        EngineBackend(path, "tensorrt_rtx")
    assert cli.run(["validate", str(path)]) == 2
    assert "--golden" in capsys.readouterr().err


def test_slow_cases_are_those_whose_parts_sum_to_more():
    part = Percentiles(1.0, 2.0, 3.0)
    latency = Latency(2, 10, part, part, part)
    assert slow_cases([("a", latency)], 9.0) == []
    (line,) = slow_cases([("a", latency)], 8.99)
    assert "case a took 9 ms" in line

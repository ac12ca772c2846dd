"""What an installed TensorRT can do is asked of it. TensorRT-RTX is here; the others are stand-ins with their names."""

from __future__ import annotations

import sys
import types

import pytest

from exporter.errors import MissingRequirement, Usage
from exporter.trt import flavor
from exporter.trt.flavor import ask, check_targets, choose, installed, portable_targets


@pytest.fixture(scope="module")
def rtx():
    found = installed("tensorrt_rtx")
    assert found is not None, "tensorrt-rtx is in the [cpu] extra"
    return found


def enum(**members):
    return types.SimpleNamespace(__members__=members, **members)


def trt8():
    """The names of TensorRT 8.6 that matter."""
    return types.SimpleNamespace(
        __name__="no_such_tensorrt",
        __version__="8.6.0",
        NetworkDefinitionCreationFlag=enum(EXPLICIT_BATCH=0, EXPLICIT_PRECISION=1),
        IBuilderConfig=types.SimpleNamespace(create_timing_cache=None),
        Builder=types.SimpleNamespace(build_serialized_network=None),
    )


def test_tensorrt_rtx_is_asked(rtx):
    assert rtx.name == "tensorrt_rtx"
    assert rtx.version == rtx.module.__version__
    assert rtx.rotary_op
    assert (rtx.strongly_typed, rtx.aot_plugins, rtx.v3_plugins, rtx.stream_build, rtx.attention_op) == (
        True,
        False,
        True,
        True,
        True,
    )
    assert not rtx.timing_cache  # it has the names and wants a GPU as soon as they are used
    assert not rtx.needs_gpu
    assert {"7.5", "8.0", "8.6", "8.9", "12.0"} <= set(rtx.targets)
    assert "9.0" not in rtx.targets


def test_tensorrt_8_is_recognised_without_comparing_versions():
    old = ask(trt8(), "tensorrt")
    assert (old.strongly_typed, old.aot_plugins, old.v3_plugins, old.stream_build, old.attention_op) == (False,) * 5
    assert old.timing_cache
    assert old.needs_gpu
    assert old.targets == ()


def test_the_default_target_is_portable_and_leaves_turing_out(rtx):
    assert check_targets(rtx, (), "bfloat16") == portable_targets(rtx)
    assert "7.5" not in portable_targets(rtx)
    assert check_targets(rtx, ("sm_120", "8.9", "89"), "bfloat16") == ("8.9", "12.0")
    assert check_targets(rtx, ("75",), "float16") == ("7.5",)


@pytest.mark.parametrize(
    ("asked", "dtype", "text"),
    [
        (("90",), "bfloat16", r"--target-sm 90: tensorrt_rtx .* builds for 7\.5"),
        (("x",), "bfloat16", "--target-sm x"),
        (("",), "bfloat16", "--target-sm"),
        (("current",), "bfloat16", "--target-sm current"),
        (("75",), "bfloat16", "no bfloat16; export with --dtype fp16"),
    ],
)
def test_a_target_that_the_flavour_lacks_is_refused(rtx, asked, dtype, text):
    with pytest.raises(Usage, match=text):
        check_targets(rtx, asked, dtype)


def test_a_target_for_tensorrt_is_refused():
    with pytest.raises(Usage, match="builds for the GPU at hand"):
        check_targets(ask(trt8(), "tensorrt"), ("90",), "float16")
    assert check_targets(ask(trt8(), "tensorrt"), (), "float16") == ()


def test_tensorrt_is_preferred_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(flavor, "installed", lambda name: name)
    assert choose(None, has_gpu=True) == "tensorrt"
    assert choose(None, has_gpu=False) == "tensorrt_rtx"
    assert choose("tensorrt", has_gpu=False) == "tensorrt"
    monkeypatch.setattr(flavor, "installed", lambda name: name if name == "tensorrt_rtx" else None)
    assert choose(None, has_gpu=True) == "tensorrt_rtx"
    with pytest.raises(MissingRequirement, match="tensorrt is not installed; pip install"):
        choose("tensorrt", has_gpu=True)
    with pytest.raises(Usage, match="--flavor onnx"):
        choose("onnx", has_gpu=True)


def test_a_broken_installation_is_one_line(monkeypatch):
    def broken(name):
        raise OSError("libnvinfer.so.10: cannot open shared object file:\nNo such file")

    monkeypatch.setattr(flavor.importlib, "import_module", broken)
    with pytest.raises(MissingRequirement, match=r"installed and cannot be loaded: libnvinfer.so.10: .*No such file"):
        installed("tensorrt")


@pytest.mark.parametrize("name", ["os", "", "tensorrt_bindings"])
def test_a_name_out_of_a_manifest_imports_nothing_else(name, monkeypatch):
    monkeypatch.setattr(flavor.importlib, "import_module", lambda _name: pytest.fail("imported"))
    assert installed(name) is None


def test_a_missing_part_and_a_namesake_are_said(tmp_path, monkeypatch):
    def part(name):
        raise ModuleNotFoundError("No module named 'tensorrt_bindings'", name="tensorrt_bindings")

    with monkeypatch.context() as patch:
        patch.setattr(flavor.importlib, "import_module", part)
        with pytest.raises(MissingRequirement, match="No module named 'tensorrt_bindings'"):
            installed("tensorrt")
    (tmp_path / "tensorrt").mkdir()  # an empty folder is a package to Python
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(MissingRequirement, match="cannot be loaded"):
            installed("tensorrt")
    finally:
        sys.modules.pop("tensorrt", None)  # else the namesake is there for every later test


def test_the_search_never_touches_the_capability_current(rtx):
    """ComputeCapability.CURRENT aborts the process where there is no GPU."""
    assert all(
        str(member).rpartition(".")[2].startswith("SM") for member in flavor.capability_targets(rtx.module).values()
    )

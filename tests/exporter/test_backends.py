"""ONNX Runtime behind the gate's interface (pitfall 10)."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

from exporter.errors import BadInput, MissingRequirement
from exporter.trt.arrays import numpy_dtype
from exporter.validation import backends
from exporter.validation.backends import OrtBackend, model_dtype
from tests.exporter.samples import DTYPES, WIDTH, pixels_of, tower, write_sample_onnx

GRIDS = ((4, 6), (8, 4))
# The artifact rounds each of five intermediate results once, as the NumPy tower does; summation order differs, so an
# element may round the other way: two units in the last place of the dtype relative to the largest element.
TOLERANCE = {"float32": 1e-5, "float16": 2 * 2**-10, "bfloat16": 2 * 2**-7}


@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model_computes_what_numpy_computes(tmp_path, monkeypatch, dtype, external):
    folder = tmp_path / "a folder \u00e9"
    folder.mkdir()
    path = write_sample_onnx(folder / "vision_tower.onnx", dtype, external)
    monkeypatch.chdir(folder)
    pixels = pixels_of(GRIDS, 2, 0, dtype)
    for given in (path, path.relative_to(folder)):  # a bare file name has an empty parent
        with OrtBackend(given, threads=1) as backend:
            assert backend.dtype == dtype
            output = backend.run(pixels, np.array(GRIDS, np.int32))
            native = backend.run_native(pixels, np.array(GRIDS, np.int32))
        assert native.dtype == numpy_dtype(dtype)
        assert np.array_equal(native.astype(np.float32), output)
        expected = tower(pixels, dtype, dtype)
        assert output.dtype == np.float32
        assert output.shape == (14, WIDTH)
        assert np.abs(output - expected).max() < TOLERANCE[dtype] * np.abs(expected).max()


def test_bf16_output_has_bf16_values_and_takes_any_memory_layout(tmp_path):
    path = write_sample_onnx(tmp_path / "tower.onnx", "bfloat16")
    pixels = pixels_of(GRIDS, 2, 0, "bfloat16")
    with OrtBackend(path, threads=1) as backend:
        output = backend.run(pixels, np.array(GRIDS))
        assert np.array_equal(output.astype(ml_dtypes.bfloat16).astype(np.float32), output)
        for same in (np.asfortranarray(pixels), pixels.astype(ml_dtypes.bfloat16), pixels[:, ::-1][:, ::-1]):
            assert np.array_equal(backend.run(same, np.array(GRIDS)), output)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_description_comes_from_the_session(tmp_path, dtype):
    with OrtBackend(write_sample_onnx(tmp_path / "tower.onnx", dtype)) as backend:
        info = backend.describe()
    assert (info.kind, info.version, info.device) == ("onnxruntime", onnxruntime.__version__, "cpu")
    assert info.providers == ("CPUExecutionProvider",)
    assert info.capability is None
    assert info.emulated is (dtype != "float32")


def test_cuda_that_is_not_there_is_refused_before_the_model_is_loaded(tmp_path):
    path = write_sample_onnx(tmp_path / "tower.onnx")
    with pytest.raises(MissingRequirement, match="CUDA"):
        OrtBackend(path, "cuda")


def test_a_silent_fallback_is_refused(tmp_path, monkeypatch):
    """onnxruntime-gpu without a GPU lists CUDA as available and then runs on the CPU (onnxruntime#17394)."""
    path = write_sample_onnx(tmp_path / "tower.onnx")
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"), pytest.raises(MissingRequirement) as caught:
        OrtBackend(path, "cuda")
    assert "fell back to CPUExecutionProvider" in caught.value.format_message()


def test_cuda_libraries_of_pip_are_loaded_before_the_session_and_in_silence(tmp_path, monkeypatch, capfd):
    path = write_sample_onnx(tmp_path / "tower.onnx")
    happened = []

    def preload_dlls():
        happened.append("libraries")
        print("Failed to load libcublas.so.13")

    def session(*_):
        happened.append("session")
        raise onnxruntime.capi.onnxruntime_pybind11_state.Fail("no more of this")

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "preload_dlls", preload_dlls)
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    with pytest.raises(BadInput, match="no more of this"):
        OrtBackend(path, "cuda")
    assert happened == ["libraries", "session"]
    assert capfd.readouterr() == ("", "")


def other_names(path):
    model = onnx.load(path)
    model.graph.input[0].name = "pixels"
    onnx.save(model, path)


def integer_input(path):
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    onnx.save(model, path)


def unknown_operator(path):
    model = onnx.load(path)
    model.graph.node[3].op_type = "Tanhh"
    onnx.save(model, path)


def external_path(location):
    def damage(path):
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        onnx.save(model, path)

    return damage


def external_field(key, value):
    def damage(path):
        model = onnx.load(path, load_external_data=False)
        entries = model.graph.initializer[0].external_data
        for entry in list(entries):
            if entry.key == key:
                entries.remove(entry)
        entries.add(key=key, value=value)
        onnx.save(model, path)

    return damage


def keep(part, name=""):
    def damage(path):
        target = path.with_name(path.name + name)
        data = target.read_bytes()
        target.write_bytes(data[: int(len(data) * part)])

    return damage


DAMAGES = {
    "missing": os.unlink,
    "empty": keep(0),
    "truncated": keep(0.5),
    "text": lambda path: path.write_text("<html>404</html>\n" * 100),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "other names": other_names,
    "integer input": integer_input,
    "unknown operator": unknown_operator,
    "weights missing": lambda path: path.with_name(path.name + ".data").unlink(),
    "weights truncated": keep(0.5, ".data"),
    "weights empty": keep(0, ".data"),
    "weights at an absolute path": external_path("/etc/passwd"),
    "weights above the folder": external_path("../../../../../../etc/passwd"),
    "giant offset": external_field("offset", str(1 << 62)),
    "giant length": external_field("length", str(1 << 62)),
    "negative offset": external_field("offset", "-4096"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_is_one_line_of_bad_input(tmp_path, capfd, damage, dtype):
    path = write_sample_onnx(tmp_path / "tower.onnx", dtype, external=True)
    damage(path)
    with pytest.raises(BadInput) as caught, OrtBackend(path, threads=1) as backend:
        backend.run(pixels_of(GRIDS, 1, 0, dtype), np.array(GRIDS))
    assert "tower.onnx" in caught.value.format_message()
    assert len(caught.value.format_message()) < 700
    assert capfd.readouterr() == ("", "")  # nothing of ONNX Runtime's own on stderr


def test_a_model_that_fails_while_running_is_named_with_its_grids(tmp_path, capfd):
    path = write_sample_onnx(tmp_path / "tower.onnx")
    with OrtBackend(path, threads=1) as backend, pytest.raises(BadInput, match=r"grids \[\(3, 2\)\]"):
        backend.run(np.zeros((1, 6, 588), np.float32), np.array([[3, 2]]))  # 6 patches make no whole rows
    assert capfd.readouterr() == ("", "")


def test_a_closed_backend_does_not_run(tmp_path):
    with OrtBackend(write_sample_onnx(tmp_path / "tower.onnx")) as backend:
        pass
    with pytest.raises((ValueError, BadInput), match="closed"):
        backend.run(np.zeros((1, 4, 588), np.float32), np.array([[2, 2]]))


def test_dtype_is_read_without_the_weights(tmp_path):
    for dtype in DTYPES:
        path = write_sample_onnx(tmp_path / f"{dtype}.onnx", dtype, external=True)
        path.with_name(path.name + ".data").unlink()
        assert model_dtype(path) == dtype


def test_capability_is_none_without_a_driver(monkeypatch):
    def missing(_name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(backends.ctypes, "CDLL", missing)
    assert backends.cuda_capability() is None


@pytest.mark.parametrize("failing", ["", "cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_capability_asks_the_driver_for_major_and_minor(monkeypatch, failing):
    """The numbers 75 and 76 are the driver API's (cuda.h, CUdevice_attribute); 0 is CUDA_SUCCESS."""

    class Driver:
        def cuInit(self, flags):
            return 0 if (flags, failing) != (0, "cuInit") else 100

        def cuDeviceGet(self, handle, ordinal):
            handle._obj.value = 40 + ordinal
            return int(failing == "cuDeviceGet")

        def cuDeviceGetAttribute(self, number, attribute, handle):
            assert handle.value == 43
            number._obj.value = {75: 12, 76: 1}[attribute]
            return int(failing == "cuDeviceGetAttribute")

    monkeypatch.setattr(backends.ctypes, "CDLL", lambda _name: Driver())
    assert backends.cuda_capability(3) == (None if failing else "12.1")

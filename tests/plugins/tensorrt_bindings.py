"""The Python layer of released TensorRT versions, importable without TensorRT's libraries.

The wheels of the bindings hold the real extension module and the real ``tensorrt.plugin`` package; only the functions
that the extension links to are made up here, and return nothing. What runs on it proves that names exist and that
TensorRT's own checks of signatures pass. It proves nothing about a result.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {
    "11.4": "tensorrt_cu13_bindings==11.4.0.106",
    "10.16": "tensorrt_cu13_bindings==10.16.1.11",
    "10.9": "tensorrt_cu12_bindings==10.9.0.34",
    "10.8": "tensorrt_cu12_bindings==10.8.0.43",
}
LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
# what the extension modules leave undefined, as nm shows
STUB = "".join(
    f"void *{name}(void) {{ return 0; }}\n"
    for name in (
        "createInferBuilder_INTERNAL",
        "createInferRefitter_INTERNAL",
        "createInferRuntime_INTERNAL",
        "createNvOnnxParserRefitter_INTERNAL",
        "createNvOnnxParser_INTERNAL",
        "getBuilderPluginRegistry",
        "getNvOnnxParserVersion",
        "getPluginRegistry",
        "initLibNvInferPlugins",
    )
)


class UnavailableError(Exception):
    """The bindings cannot be had here, and why."""


@functools.cache
def bindings(version: str) -> Path:
    """Return the folder to import ``tensorrt`` from; it is made at the first call and kept in the virtual environment.

    Raises:
        UnavailableError: no C compiler, or no wheel can be downloaded for this Python.
    """
    requirement = VERSIONS[version]
    tag = f"{requirement.replace('==', '-')}-{sys.implementation.cache_tag}"
    folder = _cache() / tag
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            made = Path(work) / "made"
            _unpack(requirement, Path(work) / "wheel", made)
            _make_stubs(made, version.split(".", maxsplit=1)[0])
            _make_shim(made)
            try:
                made.rename(folder)
            except OSError:  # another process was first
                if not folder.is_dir():
                    raise
    return folder


def _cache() -> Path:
    """The virtual environment's own share folder, and a temporary one where there is none or it cannot be written."""
    share = Path(sys.prefix) / "share"
    if sys.prefix != sys.base_prefix and os.access(share if share.is_dir() else share.parent, os.W_OK):
        return share / "kvit-tensorrt-bindings"
    return Path(tempfile.gettempdir()) / f"kvit-tensorrt-bindings-{os.getuid()}"


def _unpack(requirement: str, download: Path, made: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    command += ["--retries", "1", "--timeout", "20", "-q", "-d", str(download), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    wheels = list(download.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise UnavailableError(f"pip cannot download {requirement}: {lines[-1] if lines else 'no reason given'}")
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(made)


def _make_stubs(made: Path, major: str) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise UnavailableError("there is no C compiler (gcc or cc) to make stand-ins for TensorRT's libraries with")
    source = made / "stub.c"
    source.write_text(STUB)
    for library in LIBRARIES:
        name = f"lib{library}.so.{major}"
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(made / name), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnavailableError(f"{compiler} cannot make a stand-in for {name}: {done.stderr.strip()}")


def _make_shim(made: Path) -> None:
    """The package ``tensorrt``, which in a full installation comes with the libraries: it hands the bindings on."""
    package = made / "tensorrt"
    shutil.copytree(made / "tensorrt_bindings" / "plugin", package / "plugin")
    (package / "__init__.py").write_text(
        "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n", encoding="utf-8"
    )


def run(version: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process in which ``import tensorrt`` gives the bindings of ``version``.

    Raises:
        UnavailableError: see :func:`bindings`.
    """
    folder = bindings(version)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH")))),
    }
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)

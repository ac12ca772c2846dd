"""The library that lets TensorRT-RTX's parser find itself; tests/plugins/test_tensorrt_v3.py parses with it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.trt import rtx_library
from exporter.trt.rtx_library import make_rtx_library_resolvable, shared_object

ROOT = Path(__file__).resolve().parents[2]
LINUX_X86_64 = sys.platform.startswith("linux") and platform.machine() == "x86_64"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed: the file was NOT read by it")
def test_readelf_reads_the_library(tmp_path):
    path = tmp_path / "made.so"
    path.write_bytes(shared_object("libone.so", "libtwo.so.1"))
    read = subprocess.run(["readelf", "-W", "-h", "-d", "-l", str(path)], capture_output=True, text=True, check=True)
    assert "Library soname: [libone.so]" in read.stdout
    assert "Shared library: [libtwo.so.1]" in read.stdout
    assert "DYN (Shared object file)" in read.stdout
    assert "X86-64" in read.stdout
    (stack,) = [line for line in read.stdout.splitlines() if "GNU_STACK" in line]
    assert "RWE" not in stack
    assert read.stderr == ""


CHECK = """
import ctypes, glob, os, sys
os.environ["TMPDIR"] = sys.argv[1]
from exporter.trt.rtx_library import SONAME, make_rtx_library_resolvable
import tensorrt_rtx, tensorrt_rtx_libs
folder = tensorrt_rtx_libs.__path__[0]
before = sorted(os.listdir(folder))
try:
    ctypes.CDLL(SONAME)
    print("resolvable before")
except OSError:
    pass
print(make_rtx_library_resolvable(), make_rtx_library_resolvable())
# what the parser does: open by that name, and find a symbol of the real library behind it
address = lambda name: ctypes.cast(ctypes.CDLL(name).getPrivateApi_INTERNAL, ctypes.c_void_p).value
print(address(SONAME) == address(SONAME + ".1"))
print(os.listdir(sys.argv[1]), sorted(os.listdir(folder)) == before)
"""


@pytest.mark.skipif(not LINUX_X86_64, reason="the mend is for Linux on x86-64")
def test_the_parsers_name_leads_to_the_library_of_the_process_and_no_file_is_left(tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: its library was NOT resolved")
    command = [sys.executable, "-c", CHECK, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines() == ["True True", "True", "[] True"], done.stderr


@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("win32", "AMD64"), ("darwin", "arm64")])
def test_elsewhere_it_says_no(monkeypatch, system, machine):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", object())
    monkeypatch.setattr(rtx_library.sys, "platform", system)
    monkeypatch.setattr(rtx_library.platform, "machine", lambda: machine)
    monkeypatch.setattr(rtx_library, "_loaded", [])
    assert make_rtx_library_resolvable() is False
    assert rtx_library._loaded == []


@pytest.mark.skipif(not LINUX_X86_64, reason="the library is for Linux on x86-64")
def test_the_file_is_gone_also_where_loading_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(rtx_library.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="libnothing"):
        rtx_library._load(shared_object("libone.so", "libnothing.so.1"))
    assert list(tmp_path.iterdir()) == []

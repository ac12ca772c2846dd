"""Settings of the whole suite: one thread and fixed examples, so that a test gives the same numbers every time."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The first call of a PyTorch operation may take seconds on a busy machine: a deadline would fail at random.
settings.register_profile("kvit", deadline=None, derandomize=True, database=None)
settings.load_profile("kvit")


def pytest_configure() -> None:
    """One thread, so that sums are split the same way on every run, and one folder for traces of the exporter."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # as in a job in the background; the tests' own processes would inherit it and not hear Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "KVIT_TEST_TRACES" not in os.environ:  # workers inherit the folder in which traces are shared
        folder = tempfile.mkdtemp(prefix="kvit-traces-")
        os.environ["KVIT_TEST_TRACES"] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        import torch
    except ModuleNotFoundError:  # the tests of the engine runtime run where torch is not installed
        return
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def own_triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile, and not find what an earlier run compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield

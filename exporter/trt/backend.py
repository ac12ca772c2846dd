"""An engine as a backend of the gate: in a process of its own, so that a crash is a verdict and not our end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.errors import BadInput, KvitError
from exporter.manifest import Manifest
from exporter.trt.child import Child, ChildDiedError
from exporter.trt.engine_worker import Lost, Open, Opened, Ran, Refused, Run
from exporter.trt.profiles import tightest
from exporter.trt.runtime import check_place
from exporter.validation.backends import CaseSkippedError, RunCrashedError
from exporter.validation.evidence import BackendInfo, Profile, Shape
from exporter.validation.gpu import cuda_capability
from exporter.validation.latency import Latency

_LOAD_SECONDS = 600.0  # the largest engines are some GB, and TensorRT-RTX compiles when it loads
_CASE_SECONDS = 300.0


def open_backend(folder: Path, manifest: Manifest) -> EngineBackend:
    """Load an engine of ours whose files were compared with its manifest before.

    Args:
        folder: the artifact's folder.
        manifest: its manifest.

    Raises:
        BadInput: it cannot be loaded, or its profiles are not those of the manifest.
        MissingRequirement: another TensorRT or GPU, or something is not installed.
    """
    flavor = check_place(folder, manifest, cuda_capability())
    v3 = manifest.plugin is not None and manifest.plugin.kind == "v3"
    wanted = manifest.files[manifest.artifact].sha256
    backend = EngineBackend(folder / manifest.artifact, flavor.name, v3_plugin=v3, sha256=wanted)
    if engine_profiles(backend.profiles) != engine_profiles(manifest.profiles):
        backend.close()
        raise BadInput(f"{folder}: the engine has other profiles than its manifest says; build it again")
    return backend


class EngineBackend:
    """A TensorRT engine.

    Attributes:
        name: short, for progress and messages.
        dtype: of the engine.
        profiles: as the engine has them.
    """

    def __init__(self, path: Path, flavor: str | None, *, v3_plugin: bool = False, sha256: str | None = None) -> None:
        """Load an engine in a process of its own.

        Args:
            path: the engine file.
            flavor: name of the TensorRT that shall run it; None for whichever is installed.
            v3_plugin: it holds Python plugins.
            sha256: of the file that shall be judged; None takes what is there.

        Raises:
            BadInput: it cannot be loaded, or another file lies there now.
            MissingRequirement: no GPU, no TensorRT or no cuda-bindings.
        """
        self.name = "engine"
        self._order, self._sha256 = Open(str(path), flavor, v3_plugin), sha256
        self._latency: Latency | None = None
        self._child: Child | None = None
        opened = self._start()
        self._info, self.dtype, self.profiles = opened.info, opened.dtype, opened.profiles

    def _start(self) -> Opened:
        child = Child("exporter.trt.engine_worker:serve", "the process that loads the engine")
        try:
            child.send(self._order)
            opened = child.receive(_LOAD_SECONDS)
        except ChildDiedError as error:
            child.close()
            raise BadInput(f"{self._order.path} cannot be loaded: {error}") from error
        except BaseException:
            child.close()
            raise
        if not isinstance(opened, Opened):
            raise TypeError(f"the engine's process answered {type(opened).__name__}")
        self._sha256 = self._sha256 or opened.sha256  # a new process must load the same file
        if opened.sha256 != self._sha256:
            child.close()
            raise BadInput(f"{self._order.path} was replaced while it was being validated; validate it again")
        self._child = child
        return opened

    def describe(self) -> BackendInfo:
        """Say what really runs, as the runtime and the GPU report it."""
        return self._info

    def latency(self) -> Latency | None:
        """Times of the case that ran last."""
        return self._latency

    def run(self, pixel_values: NDArray[Any], grid_hws: NDArray[np.int64]) -> NDArray[np.float32]:
        """Compute one case; see `exporter.validation.backends.Backend.run`.

        Raises:
            CaseSkippedError: the sizes fit no profile; the GPU was not touched.
            RunCrashedError: the process was lost on this case; the next case starts a new one.
        """
        self._latency = None
        shape = Shape(int(pixel_values.shape[0]), int(pixel_values.shape[1]), int(grid_hws.shape[0]))
        try:
            tightest(self.profiles, shape)
        except ValueError as error:
            raise CaseSkippedError(str(error)) from error
        answer = self._ask(Run(np.ascontiguousarray(pixel_values, dtype=np.float32), np.asarray(grid_hws)))
        if isinstance(answer, Refused):
            raise CaseSkippedError(answer.reason)
        if isinstance(answer, Lost):
            self.close()  # after a CUDA error a process can use its GPU no more
            raise RunCrashedError(answer.reason)
        self._latency = answer.latency
        return answer.output

    def _ask(self, job: Run) -> Ran | Refused | Lost:
        try:
            if self._child is None:
                self._start()
            child = self._child
            if child is None:
                raise RunCrashedError("the engine could not be loaded again")
            child.send(job)
            answer = child.receive(_CASE_SECONDS)
        except (ChildDiedError, KvitError) as error:  # a GPU that is gone after a crash is an outcome of the crash
            self.close()
            raise RunCrashedError(str(error)) from error
        if not isinstance(answer, Ran | Refused | Lost):
            raise TypeError(f"the engine's process answered {type(answer).__name__}")
        return answer

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def __enter__(self) -> EngineBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def engine_profiles(profiles: Sequence[Profile]) -> list[tuple[Shape, Shape, Shape]]:
    """Corners of profiles, without their names, which an engine does not keep."""
    return [(profile.min, profile.opt, profile.max) for profile in profiles]

"""The few CUDA calls that running an engine takes, through cuda-bindings, with errors as exceptions."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from exporter.errors import MissingRequirement


class CudaError(RuntimeError):
    """A CUDA call failed; after most of them the process can use its GPU no more."""


def runtime_api() -> Any:  # noqa: ANN401 - a module
    """Import CUDA's runtime API.

    Raises:
        MissingRequirement: cuda-bindings is not installed.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise MissingRequirement(
            "running an engine needs cuda-bindings; pip install 'kvit-export[runtime]', or [gpu]"
        ) from error
    return runtime


class Cuda:
    """One GPU, one stream of its own, and timed calls on it.

    Attributes:
        device: ordinal among the visible GPUs.
        name: of the GPU.
        capability: compute capability, such as ``9.0``.
        stream: handle of the stream.
    """

    def __init__(self, device: int = 0, api: Any = None) -> None:  # noqa: ANN401
        """Take a GPU.

        Args:
            device: ordinal among the visible GPUs.
            api: stands in for cuda.bindings.runtime.

        Raises:
            MissingRequirement: there is no such GPU, or no cuda-bindings.
        """
        self.api = api or runtime_api()
        try:
            self.call("cudaSetDevice", device)
            properties = self.call("cudaGetDeviceProperties", device)
        except CudaError as error:
            raise MissingRequirement(f"no usable CUDA GPU number {device}: {error}; check nvidia-smi") from error
        name = properties.name
        self.device = device
        self.name = name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name)
        self.capability = f"{properties.major}.{properties.minor}"
        self._stream = self.call("cudaStreamCreateWithFlags", 1)  # does not wait for the legacy default stream
        self.stream = int(self._stream)

    def call(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401
        """Call a function of the runtime API.

        Returns:
            What it gives beside its error code: nothing, one value, or several.

        Raises:
            CudaError: the call failed.
        """
        code, *values = getattr(self.api, name)(*arguments)
        if int(code) != 0:
            _, text = self.api.cudaGetErrorString(code)
            said = text.decode() if isinstance(text, bytes) else str(text)
            raise CudaError(f"{name}: {said} (error {int(code)})")
        return values[0] if len(values) == 1 else tuple(values) or None

    def activate(self) -> None:
        """Make this GPU the current one of the calling thread; other libraries and threads choose their own."""
        self.call("cudaSetDevice", self.device)

    def allocate(self, size: int) -> int:
        """Allocate device memory; returns its address."""
        return int(self.call("cudaMalloc", max(size, 1)))

    def free(self, address: int) -> None:
        """Free what `allocate` gave."""
        self.call("cudaFree", address)

    def free_memory(self) -> int:
        """Bytes of the GPU that nobody uses."""
        return int(self.call("cudaMemGetInfo")[0])

    def to_device(self, target: int, source: int, size: int) -> None:
        """Copy from the host on the stream."""
        self.call("cudaMemcpyAsync", target, source, size, self.api.cudaMemcpyKind.cudaMemcpyHostToDevice, self._stream)

    def to_host(self, target: int, source: int, size: int) -> None:
        """Copy to the host on the stream."""
        self.call("cudaMemcpyAsync", target, source, size, self.api.cudaMemcpyKind.cudaMemcpyDeviceToHost, self._stream)

    def within_device(self, target: int, source: int, size: int) -> None:
        """Copy from device to device on the stream."""
        kind = self.api.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self.call("cudaMemcpyAsync", target, source, size, kind, self._stream)

    def wait(self) -> None:
        """Wait until everything on the stream is done."""
        self.call("cudaStreamSynchronize", self._stream)

    def wait_for(self, stream: int) -> None:
        """Wait until another stream, that whoever made an input worked on, is done."""
        self.call("cudaStreamSynchronize", stream)

    def event(self) -> Any:  # noqa: ANN401 - a handle
        """Make an event that takes times."""
        return self.call("cudaEventCreate")

    def record(self, event: Any) -> None:  # noqa: ANN401
        """Let the event take the time when the stream reaches it."""
        self.call("cudaEventRecord", event, self._stream)

    def milliseconds(self, first: Any, last: Any) -> float:  # noqa: ANN401
        """Time between two events that were reached."""
        return float(self.call("cudaEventElapsedTime", first, last))

    def close(self) -> None:
        """Give the stream back."""
        if self._stream is not None:
            self.call("cudaStreamDestroy", self._stream)
            self._stream = None

    def __enter__(self) -> Cuda:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DeviceBuffer:
    """Device memory that grows when more is asked for, so that a server's calls allocate nothing in the end."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._address = 0
        self._size = 0

    def reserve(self, size: int) -> int:
        """Return the address of at least ``size`` bytes; what was there before is lost if it has to grow."""
        if size > self._size:
            self.release()
            self._address, self._size = self._cuda.allocate(size), size
        return self._address

    def release(self) -> None:
        """Free the memory."""
        if self._size:
            address, self._address, self._size = self._address, 0, 0
            self._cuda.free(address)

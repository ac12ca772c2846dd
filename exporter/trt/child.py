"""A process of its own for TensorRT: when it crashes or hangs, that is an outcome to report and not our end.

The child runs one function, which talks to its parent over one connection. It ends with the thread that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from exporter.errors import BuildFailed, KvitError, one_line

_PR_SET_PDEATHSIG = 1
# Python puts the working directory first: a user's onnx.py must not run in place of the package
_START = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
from exporter.trt.child import main
main(int(sys.argv[1]), sys.argv[2])
"""
_TAIL = 2000  # bytes of the child's own output that a message may quote from


class ChildDiedError(Exception):
    """The child ended without an answer, or did not answer in time; the message says how."""


class Child:
    """A child process; a context manager that leaves no process behind."""

    def __init__(self, function: str, name: str) -> None:
        """Start it.

        Args:
            function: ``MODULE:FUNCTION``, called with the child's end of the connection.
            name: for messages.
        """
        self._name = name
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-c", _START, str(theirs.fileno()), function],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, "PYTHONPATH": _search_path()},
                start_new_session=True,  # Ctrl-C reaches us alone, and we end the child
            )
        self._connection = Connection(ours.detach())

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            ChildDiedError: nobody is there to take it.
        """
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._died() from error

    def poll(self, seconds: float) -> bool:
        """Whether a message, or the child's end, is there; waits at most so long."""
        try:
            return self._connection.poll(seconds)
        except OSError:
            return True

    def receive(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - whatever the two ends agreed on
        """Wait for a message.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            ChildDiedError: it ended, or time is up; in either case it is gone afterwards.
            KvitError: that it sent in place of an answer.
        """
        try:
            if not self._connection.poll(timeout):
                self.close()
                raise ChildDiedError(f"{self._name} gave no answer within {timeout:g} s")
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(message, KvitError):
            raise message
        return message

    def close(self) -> None:
        """End the child, at once."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._connection.close()
        if not self._output.closed:
            self._output.close()

    def _died(self) -> ChildDiedError:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else _signal_name(-code)
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - _TAIL))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        said = f"; its last words: {one_line(lines[-1])[:200]}" if lines else ""
        return ChildDiedError(f"{self._name} ended with {how}{said}")

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _signal_name(number: int) -> str:
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"


def _search_path() -> str:
    """This package's place first: we may have been imported from a path that only our own process knows."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def main(descriptor: int, function: str) -> None:
    """Run the child's function, and tell its parent of a fault that the user can act on.

    Args:
        descriptor: of the child's end of the connection.
        function: ``MODULE:FUNCTION``.
    """
    # a parent that was killed must not leave a build behind that nobody waits for
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(descriptor)
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(connection)
    except KvitError as error:
        with contextlib.suppress(OSError):
            connection.send(error)
    except OSError as error:
        with contextlib.suppress(OSError):
            connection.send(BuildFailed(f"{error.filename or 'a file'}: {error.strerror or error}"))

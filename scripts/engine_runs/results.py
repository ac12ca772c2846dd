"""Where the phases of :mod:`scripts.gpu_engines` keep what they measure, and how they call ``kvit-export``."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import os
import signal
import subprocess
import tarfile
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent

Record = dict[str, Any]

COMMAND = "from exporter.cli import main; main()"
VERSIONS = (
    "import json, sys, numpy, onnx, tensorrt; print(json.dumps({'python': sys.version.split()[0], "
    "'numpy': numpy.__version__, 'onnx': onnx.__version__, 'tensorrt': tensorrt.__version__}))"
)


class Results:
    """Keeps what was measured, written whenever there is more."""

    def __init__(self, folder: Path, engines: Path, python: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.engines = folder / "results.json", engines
        self._lock = threading.Lock()
        self._state: Record = {"machine": {}, "engines": {}, "repeated": {}, **read_json(self.path)}
        self._state["machine"] = describe_machine(python)

    def get(self, kind: str) -> Record:
        """Records of a kind (``engines`` or ``repeated``) by name."""
        found: Record = self._state[kind]
        return found

    def put(self, kind: str, name: str, found: Record) -> None:
        """Keep one record."""
        with self._lock:
            self._state[kind][name] = found
            self._save()

    def save(self) -> None:
        """Write the results so far."""
        with self._lock:
            self._save()

    def _save(self) -> None:
        text = json.dumps(self._state, indent=1, sort_keys=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, self.path)
        with tarfile.open(temporary, "w:gz") as archive:
            for path in sorted(self.engines.glob("[!.]*/*.json")) + sorted(self.engines.glob("*.log")):
                with contextlib.suppress(FileNotFoundError):  # it is being replaced by a build beside this one
                    content = path.read_bytes()  # before its size is written down: a log grows meanwhile
                    entry = tarfile.TarInfo(path.relative_to(self.engines).as_posix())
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
        os.replace(temporary, self.path.with_name("records.tar.gz"))


def describe_machine(python: str) -> Record:
    """GPU, driver and versions; what cannot be found out is None."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    found: Record = {"gpu": None, "versions": None}
    with contextlib.suppress(OSError):
        code, output, _ = call(query, 30)
        found["gpu"] = output.strip() if code == 0 else None
    with contextlib.suppress(OSError):
        code, output, _ = call([python, "-c", VERSIONS], 60)
        found["versions"] = json.loads(output) if code == 0 else None
    return found


def now() -> str:
    """The time in UTC, to the second."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")


def call(command: list[str], seconds: float, log: Path | None = None) -> tuple[int | None, str, str]:
    """Run a command with this repository importable; end it and all its children when its time is over.

    Args:
        command: to run.
        seconds: that it may take.
        log: file that gets what the command writes on stderr while it runs, and on stdout at the end.

    Returns:
        Exit code, None if time was over; what it wrote on stdout and on stderr.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # a wrapper that sets PYTHONPATH itself can append PYTHONPATH86
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONPATH86": str(ROOT)}
    with tempfile.TemporaryFile("w+") if log is None else log.open("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        code: int | None = None
        try:
            output, _ = process.communicate(timeout=seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        errors.seek(0)
        text = errors.read()
        errors.write(f"\n{output}")
    return code, output, text


def worst(judgement: Record, metric: str, subject: str = "") -> Record | None:
    """The check of a metric that lies farthest from its ideal, over all cases: measured beside allowed."""
    checks = [
        {"case": case["name"], "measured": check["measured"], "allowed": check["allowed_high"]}
        for case in judgement.get("cases", [])
        for check in case["checks"]
        if check["metric"] == metric and (not subject or check["subject"] == subject)
    ]
    return max(
        checks, key=lambda check: float("inf") if check["measured"] is None else abs(check["measured"]), default=None
    )


def read_json(path: Path) -> Record:
    """Content of a JSON file; empty where there is none."""
    found: Record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found

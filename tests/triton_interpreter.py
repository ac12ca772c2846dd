"""Runs functions of a test module under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def interpreted(module: str, *functions: str) -> dict[str, Any]:
    """Call functions without arguments there, because TRITON_INTERPRET is read when a kernel is defined.

    Args:
        module: a test module.
        functions: names in it; each returns what JSON can hold.

    Returns:
        The results by name.
    """
    calls = ", ".join(f"{name!r}: module.{name}()" for name in functions)
    code = f"import json, {module} as module; print(json.dumps({{{calls}}}))"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refusals_of(function: Callable[..., object], calls: Iterable[tuple[Any, ...]]) -> list[str]:
    """What a function says of each call with its ValueError; ``nothing`` where it takes the call."""
    said = []
    for arguments in calls:
        try:
            function(*arguments)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said

"""What the GPU benchmarks share: showing what was measured, whether they can run here, and writing their results."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from exporter.files import write_text

EXIT_NO_GPU = 8
EXIT_BAD_INPUT = 3


def unavailable(script: str) -> str | None:
    """Why a script that needs PyTorch, Triton and a GPU can measure nothing here, in one line.

    Args:
        script: its name, for the message.
    """
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return f"{script} needs PyTorch and Triton: {error}; install kvit-export[gpu]"
    return None if torch.cuda.is_available() else f"{script} needs a CUDA GPU, and PyTorch sees none here"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file that is whole or not there, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=1) + "\n")


def surroundings(script: str) -> dict[str, Any]:
    """When, by which command, on which GPU and with which versions a script measures, where `unavailable` says nothing.

    Args:
        script: its name.
    """
    import torch
    import triton

    return {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "command": f"python scripts/{script}.py " + " ".join(Path(word).name for word in sys.argv[1:]),
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "triton": triton.__version__,
        },
    }


def _show(arguments: argparse.Namespace, report: ModuleType) -> None:
    if arguments.plot:
        report.draw(json.loads(arguments.plot.read_text(encoding="utf-8")), arguments.picture)
    if arguments.tables:
        print(report.tables(json.loads(arguments.tables.read_text(encoding="utf-8"))))


def run(
    script: str,
    arguments: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    report: Callable[[], ModuleType],
) -> int:
    """Show an older result, or measure and write a new one.

    Args:
        script: its name, for messages.
        arguments: with ``plot``, ``picture``, ``tables`` and ``output``.
        measure: makes the result; called only where there is a GPU.
        report: imports the module whose ``draw`` and ``tables`` show a result.

    Returns:
        The exit code.
    """
    if arguments.plot or arguments.tables:
        try:
            _show(arguments, report())
        except OSError as error:
            print(f"{script}: cannot read {error.filename}: {error.strerror}", file=sys.stderr)
            return EXIT_BAD_INPUT
        except (ValueError, KeyError, TypeError, IndexError) as error:
            shown = arguments.plot or arguments.tables
            print(f"{script}: {shown} is no result of this script ({type(error).__name__}: {error})", file=sys.stderr)
            return EXIT_BAD_INPUT
        return 0
    if reason := unavailable(script):
        print(reason, file=sys.stderr)
        return EXIT_NO_GPU
    result = measure(arguments)
    if arguments.output:
        write_json(arguments.output, result)
    else:
        print(json.dumps(result, indent=1))
    return 0

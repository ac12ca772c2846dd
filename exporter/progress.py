"""Progress on stderr: a live line on a terminal, one plain line a step elsewhere, and never anything on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SILENCE = 60.0  # seconds after which a log hears that a long step goes on
Tell = Callable[[str, int, int], None]


@contextmanager
def progress(quiet: bool = False) -> Iterator[Tell]:
    """Give a function that is told (step, done, total).

    The first word or words before a digit-free space name the phase; a plain log gets one line a phase, so that a build
    server's log stays readable.

    Args:
        quiet: say nothing.
    """
    start = time.monotonic()
    if quiet:
        yield lambda _step, _done, _total: None
        return
    if sys.stderr.isatty():
        with _live_line(start) as tell:
            yield tell
        return
    phases: set[str] = set()
    last = start

    def line(step: str, _done: int, total: int) -> None:
        nonlocal last
        phase = step.partition(" ")[0]
        if phase not in phases or time.monotonic() - last > _SILENCE:
            phases.add(phase)
            last = time.monotonic()
            count = f" ({total} parts)" if total > 1 else ""
            print(f"[{time.monotonic() - start:7.1f} s] {phase}{count}", file=sys.stderr, flush=True)  # noqa: T201

    yield line


@contextmanager
def _live_line(start: float) -> Iterator[Tell]:
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status("starting") as status:

        def tell(step: str, done: int, total: int) -> None:
            part = f" {done + 1}/{total}" if total > 1 and done < total else ""
            status.update(f"{escape(step)}{part}  [dim]{time.monotonic() - start:.0f} s[/dim]")

        yield tell

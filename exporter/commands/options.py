"""Options that several commands share, and the one way to say that a package is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from exporter.errors import MissingRequirement


class GridSize(click.ParamType[tuple[int, int]]):
    """``HxW`` in patches."""

    name = "HxW"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Parse ``36x46`` into (36, 46)."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d{1,4})x(\d{1,4})", str(value))
        if match is None:
            self.fail(f"{value!r} is not HxW in patches, such as 36x46", param, ctx)
        return int(match[1]), int(match[2])


OUTPUT = click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder that shall appear.",
)
FORCE = click.option("--force", is_flag=True, help="Replace an existing folder that this program wrote.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def GOLDEN(function: click.decorators.FC) -> click.decorators.FC:  # noqa: N802 - reads as the constants beside it
    """Add the options that say what a golden set holds."""
    decorators = (
        click.option(
            "--image",
            "images",
            type=click.Path(path_type=Path),
            multiple=True,
            help="Photo for the golden set; may be repeated.  [default: one that a dependency ships]",
        ),
        click.option(
            "--golden-sizes",
            type=GridSize(),
            multiple=True,
            help="Further grid for the golden set, in patches; may be repeated.",
        ),
        click.option(
            "--max-patches",
            type=click.IntRange(min=4),
            default=4096,
            show_default=True,
            help="Leave out default grids of the golden set with more patches.",
        ),
        click.option(
            "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where PyTorch runs."
        ),
    )
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


@contextmanager
def needs(command: str, extra: str) -> Iterator[None]:
    """Turn a missing package into one line that says what to install.

    Args:
        command: that needs it.
        extra: of this project that brings it.

    Raises:
        MissingRequirement: an import in the block failed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingRequirement(
            f"kvit-export {command} needs {error.name}, which is not installed; pip install 'kvit-export[{extra}]'"
        ) from error

"""Options that several commands share, and the one way to say that a package is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from exporter.errors import MissingRequirement

Size = tuple[int, tuple[tuple[int, int], ...]]
"""Frames, and (rows, columns) in patches of each item."""


class GridSize(click.ParamType[Size]):
    """``[Tx]HxW`` in patches, several items joined by ``+``."""

    name = "[Tx]HxW[+...]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Size:
        """Parse ``36x46`` into (1, ((36, 46),)), ``4x30x34+4x8x8`` into (4, ((30, 34), (8, 8)))."""
        if isinstance(value, tuple):
            return value
        found = [re.fullmatch(r"(?:(\d{1,4})x)?(\d{1,4})x(\d{1,4})", item) for item in str(value).split("+")]
        items = [(int(match[1] or 1), int(match[2]), int(match[3])) for match in found if match]
        if len(items) < len(found):
            self.fail(
                f"{value!r} is not HxW in patches, such as 36x46, or TxHxW for a clip; join items by +", param, ctx
            )
        if len({frames for frames, _, _ in items}) > 1:
            self.fail(f"{value!r}: the items of one call have equally many frames", param, ctx)
        return items[0][0], tuple((height, width) for _, height, width in items)


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
            help="Further call for the golden set, in patches: 36x46, a clip 4x30x34 (frames first), or several items "
            "36x46+16x16 with --packing packed; may be repeated.",
        ),
        click.option(
            "--max-patches",
            type=click.IntRange(min=4),
            default=4096,
            show_default=True,
            help="Leave out default calls of the golden set with more patches, over all frames and items.",
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

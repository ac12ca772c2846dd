"""What a command can end with; each class owns its exit code and is shown as one line on stderr."""

from __future__ import annotations

from typing import IO, Any, ClassVar

import click

PROGRAM = "kvit-export"


def one_line(text: str) -> str:
    """Fold a text into one printable line.

    Messages of other libraries span lines, and names out of a damaged file may hold terminal control codes; both would
    break the rule that a fault is one line on stderr.

    Args:
        text: any text.

    Returns:
        The words of the text, separated by single spaces, with unprintable characters replaced by ``?``.
    """
    words = " ".join(text.split())
    return "".join(character if character.isprintable() else "?" for character in words)


class KvitError(click.ClickException):
    """A fault that the user can act on; the message says what, where and what to do."""

    exit_code: ClassVar[int] = 1

    def format_message(self) -> str:
        """Return the message as one line."""
        return one_line(self.message)

    def show(self, file: IO[Any] | None = None) -> None:
        """Write ``kvit-export: MESSAGE`` as exactly one line.

        Args:
            file: where to write; stderr when left out.
        """
        click.echo(f"{PROGRAM}: {self.format_message()}", file=file, err=file is None)


# The classes below are named after what the exit code says, not after Python's habit of an Error suffix.


class Usage(KvitError):  # noqa: N818
    """Options that contradict each other or name something that does not exist."""

    exit_code = 2


class BadInput(KvitError):  # noqa: N818
    """A checkpoint, image, ONNX file, engine, manifest or golden set that cannot be used."""

    exit_code = 3


class ExportFailed(KvitError):  # noqa: N818
    """The export to ONNX did not give a model that keeps the contract."""

    exit_code = 4


class BuildFailed(KvitError):  # noqa: N818
    """TensorRT did not build an engine."""

    exit_code = 5


class ValidationFailed(KvitError):  # noqa: N818
    """The artifact does not compute what PyTorch computes."""

    exit_code = 6


class NotValidated(KvitError):  # noqa: N818
    """Nothing is known to be wrong, but not everything that a verdict needs was compared, or not here."""

    exit_code = 7


class MissingRequirement(KvitError):  # noqa: N818
    """A package, a library or a suitable GPU is missing."""

    exit_code = 8

"""Exit codes and the one line on stderr."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from exporter import errors

CODES = {
    errors.Usage: 2,
    errors.BadInput: 3,
    errors.ExportFailed: 4,
    errors.BuildFailed: 5,
    errors.ValidationFailed: 6,
    errors.NotValidated: 7,
    errors.MissingRequirement: 8,
}


@pytest.mark.parametrize(("kind", "code"), CODES.items(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_an_error_ends_the_command_with_its_code_and_one_line_on_stderr(kind, code):
    @click.command()
    def command() -> None:
        raise kind("first line\n  second\tline\r\nthird \x1b[31mred\x00")

    result = CliRunner().invoke(command)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr == "kvit-export: first line second line third ?[31mred?\n"


def test_every_error_of_the_module_is_in_the_table():
    found = {value for value in vars(errors).values() if isinstance(value, type) and value.__base__ is errors.KvitError}
    assert found == set(CODES)


def test_a_path_that_the_terminal_cannot_encode_is_still_one_line():
    """A name of other letters under an ASCII locale must not end in UnicodeEncodeError (pitfall 24)."""
    code = "from exporter.errors import BadInput; BadInput('\\u6a21\\u578b.onnx is missing').show()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONIOENCODING": "ascii"}, capture_output=True, check=True
    )
    assert done.stderr.startswith(b"kvit-export: ")
    assert done.stderr.endswith(b".onnx is missing\n")
    assert done.stderr.count(b"\n") == 1
    assert done.stdout == b""

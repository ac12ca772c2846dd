"""The command line: finds the command, turns faults into one line and an exit code. Imports nothing heavy."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
from typing import Any

import click

from exporter.errors import BadInput, KvitError, one_line
from model.errors import InputError

# name -> first line of its help, so that listing the commands imports none of them
COMMANDS = {
    "onnx": "Export a vision tower to ONNX and check what was written.",
    "trt": "Build a TensorRT engine from an exported tower and judge it where it can run.",
    "golden": "Record what PyTorch computes, to judge artifacts by.",
    "validate": "Run an artifact on its golden set and judge it.",
    "verify": "Exit with 0 only if this very artifact passed, for this GPU and this TensorRT.",
    "bench": "Time live towers, ONNX models and engines side by side, and compare what they compute.",
    "inspect": "Show what an artifact holds and where it came from.",
}
INTERNAL_FAULT, INTERRUPTED = 1, 130
# what click raises for a command line without a command, since its release 8.2
_HELP: tuple[type[click.ClickException], ...] = tuple(
    kind for kind in [getattr(click.exceptions, "NoArgsIsHelpError", None)] if kind
)


def version() -> str:
    """Version of the installed package; ``0+source`` when run from a tree that is not installed."""
    from importlib import metadata  # takes longer to import than all the rest of this module

    try:
        return metadata.version("kvit-export")
    except metadata.PackageNotFoundError:
        return "0+source"


def _show_version(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(f"kvit-export {version()}")
        context.exit()


class _InterruptedError(Exception):
    """Ctrl-C, under a name that click does not know: it prints an empty line for a KeyboardInterrupt."""


class LazyGroup(click.Group):
    """A group that imports a command's module when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: D102
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: D102
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"exporter.commands.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"exporter.commands.{cmd_name}.command is no command")
        return command

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401, D102 - click's own signature
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _InterruptedError from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: D102
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version.",
)
@click.option("--debug", is_flag=True, envvar="KVIT_DEBUG", help="Show a traceback when something fails.")
def cli(debug: bool) -> None:
    """Take a Kimi vision tower from a checkpoint to ONNX and TensorRT, and prove that it computes the same."""


def main() -> None:
    """Run the command line and exit with the code that the design gives to the outcome."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    sys.exit(run(sys.argv[1:]))


def _terminate(number: int, _frame: object) -> None:
    """End in order, so that no temporary folder of some gigabytes stays behind."""
    sys.exit(128 + number)


def run(arguments: list[str]) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name.

    Returns:
        The exit code.
    """
    # an option of the program and not of a command, so it stands before the command
    before = list(itertools.takewhile(lambda word: word.startswith("-"), arguments))
    debug = "--debug" in before or os.environ.get("KVIT_DEBUG", "") not in ("", "0")
    try:
        outcome = cli.main(arguments, prog_name="kvit-export", standalone_mode=False)
    except (KeyboardInterrupt, _InterruptedError, click.exceptions.Abort):
        return _fail("interrupted; nothing was written", INTERRUPTED, debug)
    except InputError as error:
        return _fail(str(error), BadInput.exit_code, debug)
    except KvitError as error:
        return _fail(error.message, error.exit_code, debug)
    except _HELP as error:
        click.echo(error.format_message(), err=True)  # the help, which is no error to be put into a line
        return error.exit_code
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code, debug)
    except BrokenPipeError:
        # the reader of our output has gone; close quietly, or Python complains while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL_FAULT
    except Exception as error:  # noqa: BLE001 - the last line of defence: a fault of ours is still one line
        name = type(error).__name__
        return _fail(f"internal fault ({name}: {error}); run again with --debug and report it", INTERNAL_FAULT, debug)
    return outcome if isinstance(outcome, int) else 0


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    click.echo(f"kvit-export: {one_line(message)}", err=True)
    return code

"""The `rmq` command."""

from __future__ import annotations

import gc
import os
import sys
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import TyperException

__all__ = ["main"]


def main() -> None:
    """Run the command line. An error prints one line on stderr, and sets the exit code of its kind (`rmqkit.errors`).
    ``rmq --debug …`` adds the traceback. An unhandled Ctrl-C is exit code 130, as in shells."""
    _open_standard_streams()
    # Imports create objects that stay: with the default threshold, 100 collections take a tenth of a start. Later, a
    # server creates thousands of short-lived objects without reference cycles.
    gc.set_threshold(50_000, 50, 100)
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _open_standard_streams() -> None:
    """Open the null device for each of the descriptors 0, 1 and 2 that the caller has closed.

    Otherwise a file of the store or a socket would get the number, and would receive printed output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process lives


def _run() -> None:
    from rmqkit import extras
    from rmqkit.errors import ExtraMissing, RmqError, exit_code

    try:
        with extras.needed("cli", "the command rmq"):
            from typer import TyperException

            from rmqkit.cli import app
    except ExtraMissing as error:
        print(f"rmq: {error}", file=sys.stderr)
        sys.exit(exit_code(error))
    try:
        code = app(prog_name="rmq", standalone_mode=False)  # the code of typer.Exit, or else the result of the command
        sys.exit(code if isinstance(code, int) else 0)
    except (RmqError, TyperException, OSError, UnicodeEncodeError) as error:
        if "--debug" in takewhile(lambda argument: argument.startswith("-"), sys.argv[1:]):
            import traceback

            traceback.print_exc()
        match error:
            case RmqError():
                text, code = str(error), exit_code(error)
            case OSError():
                place = error.filename or "a file or the output"
                text, code = f"cannot read or write {place}: {error.strerror or error}", 1
            case UnicodeEncodeError():
                char = error.object[error.start]
                text, code = f"{char!r} cannot be written in {error.encoding}: give and have printed what is UTF-8", 2
            case _:
                text, code = _misunderstood(error), error.exit_code
        if text and _wants_json():
            import json

            report = {"error": text, "kind": type(error).__name__, "exitCode": code}
            print(json.dumps(report, ensure_ascii=False), file=sys.stderr)
        elif text:
            print(f"rmq: {text}", file=sys.stderr)
        sys.exit(code)


def _wants_json() -> bool:
    """Return True if the command line has ``--json``: then errors are JSON objects, too."""
    return "--json" in takewhile(lambda argument: argument != "--", sys.argv[1:])


def _misunderstood(error: TyperException) -> str:
    """Return the error of a command line, and the command for its help; "" if the help was already printed."""
    text, context = " ".join(error.format_message().split()), getattr(error, "ctx", None)
    if not text or context is None:
        return text
    end = "" if text[-1] in ".?!" else "."
    return f"{text}{end} See: {context.command_path} {context.help_option_names[0]}"


if __name__ == "__main__":
    main()

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
    """Run the command line; an error is one line on stderr and the exit code of its kind (`rmqkit.errors`).
    ``rmq --debug …`` shows where it came from. Ctrl-C before a command minds it is 130, as shells have it."""
    _open_standard_streams()
    # What is imported stays, so looking for garbage among it 100 times is a tenth of a start; a server, later, has
    # objects that come and go by the thousand without any garbage in cycles.
    gc.set_threshold(50_000, 50, 100)
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _open_standard_streams() -> None:
    """Open those of the descriptors 0, 1 and 2 that the caller closed on the null device.

    Else a file of the store, or a socket, would get the number, and would receive printed output.
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
        code = app(prog_name="rmq", standalone_mode=False)  # of typer.Exit, or else what the command returned
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

            told = {"error": text, "kind": type(error).__name__, "exitCode": code}
            print(json.dumps(told, ensure_ascii=False), file=sys.stderr)
        elif text:
            print(f"rmq: {text}", file=sys.stderr)
        sys.exit(code)


def _wants_json() -> bool:
    """Return True if the command was asked for JSON: its errors are an object then, too."""
    return "--json" in takewhile(lambda argument: argument != "--", sys.argv[1:])


def _misunderstood(error: TyperException) -> str:
    """Return the error in a command line, and the command for its help; "" if the help was printed instead."""
    told, context = " ".join(error.format_message().split()), getattr(error, "ctx", None)
    if not told or context is None:
        return told
    end = "" if told[-1] in ".?!" else "."
    return f"{told}{end} See: {context.command_path} {context.help_option_names[0]}"


if __name__ == "__main__":
    main()

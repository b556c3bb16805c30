"""The `rmq` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; an error is one line on stderr and exit code 1."""
    from rmqkit.cli import app
    from rmqkit.errors import RmqError

    try:
        app()
    except RmqError as error:
        print(f"rmq: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

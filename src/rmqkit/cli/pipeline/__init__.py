"""``rmq pipeline``: the Spark jobs, from a laptop's ``local[*]`` to a cluster by ``--master``.

A command (`commands`) starts a session, calls its job, and shows what comes back (`session`). pyspark is imported when
a job runs.
"""

from __future__ import annotations

import typer

from rmqkit.cli.pipeline import commands

__all__ = ["app"]

app = typer.Typer(
    name="pipeline", help="Spark jobs over stores and topics.", no_args_is_help=True, add_completion=False
)
for _command in (
    *(commands.summary, commands.audit, commands.diff, commands.verify, commands.rebuild),
    *(commands.query, commands.sql, commands.archive, commands.replay),
):
    app.command()(_command)


@app.callback()
def _pipeline() -> None: ...

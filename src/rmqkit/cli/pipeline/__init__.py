"""``rmq pipeline``: the Spark jobs, from a laptop's ``local[*]`` to a cluster by ``--master``.

A command is a function that starts a session (`running.session`), calls its job, and shows what comes back
(`showing.show`): `looking` and `searching` have those that only read, `doing` those that write. pyspark is imported
when a job runs.
"""

from __future__ import annotations

import typer

from rmqkit.cli.pipeline import doing, looking, searching

__all__ = ["app"]

app = typer.Typer(
    name="pipeline", help="Spark jobs over stores and topics.", no_args_is_help=True, add_completion=False
)
for _command in (
    *(looking.summary, looking.audit, looking.diff, looking.verify, doing.rebuild),
    *(searching.query, searching.sql, doing.archive, doing.replay),
):
    app.command()(_command)


@app.callback()
def _pipeline() -> None: ...

"""SQL over the messages of a store, by DuckDB in this process: the table is called ``messages``.

DuckDB hands the columns and the comparisons of a statement to `rmqkit.arrow.store_dataset`, so that no more is read
than they ask for. Comparisons with constants go there, joined by ``and``, ``or`` and ``in``; ``like`` and functions of
columns do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmqkit import extras
from rmqkit.arrow import DAMAGE_HINT as DAMAGE_HINT
from rmqkit.arrow import dataset as dataset
from rmqkit.errors import RmqError, SettingsError

if TYPE_CHECKING:
    import pyarrow as pa

    from rmqkit.arrow.store_dataset import StoreDataset

__all__ = ["query"]

_BATCH_ROWS = 8192


def query(messages: StoreDataset, sql: str, *, unsafe: bool = False) -> pa.RecordBatchReader | None:
    """Run a statement; its rows, which are read as they are asked for, or None when it has none.

    A statement reads the store alone. DuckDB would read and write every file of the user, attach databases, load
    extensions and reach the network (`read_text`, `copy … to`, `attach`, `install`).

    Args:
        unsafe: let the statement do all of this.

    Raises SettingsError: DuckDB does not understand the statement. Raises ExtraMissing: it is not installed.
    Raises StoreError: a file of the store is damaged or gone. Raises RmqError: DuckDB fails for another reason."""
    with extras.needed("query", "SQL over a store"):
        import duckdb
    # No extension is fetched from the network because of a word in a statement.
    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": "false",
        "python_enable_replacements": "false",
    }
    connection = duckdb.connect(":memory:", config=config)
    connection.register("messages", messages)
    if not unsafe:
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
    try:
        rows = connection.sql(sql)
        found: pa.RecordBatchReader | None = None
        if rows is not None:  # as it is for some statements
            found = rows.to_arrow_reader(_BATCH_ROWS)
    except duckdb.Error as error:
        if messages.failure is not None:
            raise messages.failure from None
        text = " ".join(str(error).split())
        if isinstance(error, duckdb.PermissionException):
            raise SettingsError(f"{text}; SQL reads the store alone: --unsafe lets it use files") from None
        if isinstance(error, duckdb.ProgrammingError | duckdb.NotSupportedError):
            raise SettingsError(text) from None
        raise RmqError(text) from None
    return found

"""SQL over the messages of a store, run by DuckDB in this process. The table is called ``messages``.

DuckDB passes the columns and the comparisons of a statement to `rmqkit.arrow.store_dataset`, which reads only the parts
that the statement needs. DuckDB passes comparisons with constants, joined by ``and``, ``or`` and ``in``, but not
``like`` and functions of columns.
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
    """Run a statement and return its rows, which are read on demand. Return None for a statement without rows.

    By default, a statement can only read the store. Without this limit DuckDB could read and write every file of the
    user, attach databases, load extensions and use the network (`read_text`, `copy … to`, `attach`, `install`).

    Args:
        unsafe: whether to remove this limit.

    Raises SettingsError: DuckDB does not understand the statement. Raises ExtraMissing: DuckDB is not installed.
    Raises StoreError: a file of the store is damaged or missing. Raises RmqError: DuckDB fails for another reason."""
    with extras.needed("query", "SQL over a store"):
        import duckdb
    # Otherwise a word in a statement could make DuckDB download an extension.
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
        if rows is not None:  # None for statements without rows
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

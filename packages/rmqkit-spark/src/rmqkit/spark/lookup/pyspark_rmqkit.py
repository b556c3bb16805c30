"""PySpark imports this module in the process that looks for data sources, because its name begins with ``pyspark_``.

That process looks once, when a session is first used with a Python source, and then waits for more work until the
session ends. Then the JVM closes the connection, the process writes its EOFError into the closed connection, and
PySpark's daemon prints a traceback with a BrokenPipeError. It imports nothing else of ours, so `keep_quiet` is called
from here. `rmqkit.spark.session` puts this folder, and no other module, on the path of the session's processes.
"""

import contextlib

# PYSPARK_PYTHON may be a Python without rmqkit: an error here would end the search for all sources.
with contextlib.suppress(ImportError):
    from rmqkit.spark.daemon import keep_quiet

    keep_quiet()

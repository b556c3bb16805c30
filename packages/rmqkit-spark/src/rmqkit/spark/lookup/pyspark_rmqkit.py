"""PySpark imports this module in the process that searches for data sources, because of its prefix ``pyspark_``.

The process searches once, when a session first uses a Python source, and then waits for more work until the session
stops. Then the JVM closes the connection, the process writes its EOFError into the closed connection, and PySpark's
daemon prints a traceback with a BrokenPipeError. The process imports no other module of rmqkit, so this module calls
`keep_quiet`. `rmqkit.spark.session` adds this folder to the path of the session's processes.
"""

import contextlib

# PYSPARK_PYTHON may be a Python without rmqkit: an error here would end the search for all sources.
with contextlib.suppress(ImportError):
    from rmqkit.spark.daemon import keep_quiet

    keep_quiet()

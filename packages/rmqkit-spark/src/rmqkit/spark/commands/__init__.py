"""``rmq pipeline``: the Spark jobs, from a laptop's ``local[*]`` to a cluster by ``--master``.

A command starts a session, calls its job, and prints the result (`session`). pyspark is imported when a job runs.
"""

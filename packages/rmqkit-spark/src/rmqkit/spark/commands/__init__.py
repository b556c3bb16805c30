"""``rmq pipeline``: the Spark jobs, from a laptop's ``local[*]`` to a cluster by ``--master``.

A command (`commands`) starts a session, calls its job, and shows what comes back (`session`). pyspark is imported when
a job runs.
"""

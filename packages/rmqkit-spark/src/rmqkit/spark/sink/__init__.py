"""The room `sink` writes rows to topics, at least once or exactly once.

==================  ================================================================================================
module              does
==================  ================================================================================================
`writers`           is what Spark calls: write in a task, commit and abort on the driver
`rows`              makes messages of rows, each with a key of its own
`producer`          sends messages, stages half messages, ends them with END_TRANSACTION
`exactly_once`      commits the half messages of a batch once, even after crashes
`ledger`            says what entries mean (pure); `ledger_topic` writes and reads them
==================  ================================================================================================
"""

from rmqkit.spark.daemon import keep_quiet

keep_quiet()  # the first thing of ours that a worker of Spark imports

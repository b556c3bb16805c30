"""The room `source` reads: stores as files (`store`), live topics from brokers (`broker`).

=====================  =============================================================================================
module                 does
=====================  =============================================================================================
`store`, `broker`      plan a read on the driver, and read a partition in a task
`tables`               gives everything in a store that is not messages
=====================  =============================================================================================

What a task does with a part of a store is `rmqkit.arrow`, which needs no Spark.
"""

from rmqkit.spark.daemon import keep_quiet

keep_quiet()  # the first thing of ours that a worker of Spark imports

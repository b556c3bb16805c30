"""The readers: stores as files (`store`), live topics from brokers (`broker`).

=====================  =============================================================================================
module                 contents
=====================  =============================================================================================
`store`, `broker`      the plan of a read on the driver, and the read of a partition in a task
`tables`               everything in a store that is not messages
=====================  =============================================================================================

Tasks read parts of a store with `rmqkit.arrow`, which does not need Spark.
"""

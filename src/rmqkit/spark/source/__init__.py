"""The room `source` reads: stores as files (`store`), live topics from brokers (`broker`).

=====================  =============================================================================================
module                 does
=====================  =============================================================================================
`store`, `broker`      plan a read on the driver, and read a partition in a task
`splits`               cuts the commit log into byte ranges, one per task
`queue_files`          reads consume queues and the index, and the records they point at
`reader`               decides on heads and topics, then decodes what is wanted into Arrow batches
`tables`               gives everything in a store that is not messages
=====================  =============================================================================================
"""

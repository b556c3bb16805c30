"""The writers of rows to topics, at least once or exactly once.

==================  ================================================================================================
module              contents
==================  ================================================================================================
`writers`           the methods that Spark calls: write in a task, commit and abort on the driver
`rows`              messages created from rows, each with a unique key
`producer`          sending messages, staging half messages, and ending them with END_TRANSACTION
`exactly_once`      committing the half messages of a batch once, even after crashes
`ledger`            meaning of the ledger's entries (pure); `ledger_topic` writes and reads the entries
==================  ================================================================================================
"""

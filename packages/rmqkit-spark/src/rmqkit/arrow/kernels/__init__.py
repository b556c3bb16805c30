"""Columns of many messages at once: `rmqkit.protocol` in bulk, with numpy and pyarrow, without Spark.

======================  ===========================================================================
`gather`                bytes of a segment → Arrow arrays, no Python loop
`batch`                 records → rows: decompression, inner batches, what could not be decoded
`properties`            property strings → map column, or single values
`columns`               one function per column: rows → Arrow array
======================  ===========================================================================

Every kernel is tested equal to the plain decoder, `rmqkit.protocol.message.read_messages`.
"""

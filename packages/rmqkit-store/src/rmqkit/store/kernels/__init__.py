"""The columns of many messages together: the decoders of `rmqkit.protocol` in bulk, with numpy and pyarrow, without
Spark.

======================  ===========================================================================
`gather`                bytes of a segment → Arrow arrays, no Python loop
`batch`                 records → rows: decompression, inner batches, decoding problems
`properties`            property strings → map column, or single values
`columns`               one function per column: rows → Arrow array
`schema`                the table of columns: name, types, function
======================  ===========================================================================

Tests compare every kernel with the plain decoder, `rmqkit.protocol.message.read_messages`.
"""

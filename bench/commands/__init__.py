"""``rmq bench``: measurements, as a table for people and as JSON for programs. `app` has the commands, and each of them
has a module with its measurements.

`rmqkit.cli.bench` finds this folder in a checkout; it is not installed. Shared modules: `served` (a server of our own),
`loaded` (a broker under load), `interleaved` (work in rounds), `process_tree` (CPU time), `naive_store` and
`naive_spark` (the obvious ways, to compare with), `sample_store` (a store made in bulk).
"""

"""``rmq bench``: measurements a person reads as a table and a program as JSON; `app` has the
commands, and a module each of them what it measures.

`rmqkit.cli.bench` finds this folder in a checkout; it is not installed. What several share: `served` (a server of our
own), `loaded` (a broker that is loaded), `interleaved` (work in rounds), `process_tree` (CPU time), `naive_store` and
`naive_spark` (the obvious way, to compare with), `sample_store` (a store made in bulk).
"""

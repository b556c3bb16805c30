"""What Spark writes: rows to topics (`writers`), with a guarantee (`exactly_once`)."""

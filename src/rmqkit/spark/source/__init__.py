"""What Spark reads: stores as files (`store`), live topics from brokers (`broker`)."""

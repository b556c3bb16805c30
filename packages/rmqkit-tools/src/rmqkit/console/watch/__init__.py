"""The snapshot of each cluster, its figures, and their history."""

"""Jobs over a whole store. Each job is a function that accepts a session and a path, and returns its result."""

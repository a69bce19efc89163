"""Documents, files and append-only logs: their reads and writes, and the announcement of changes."""

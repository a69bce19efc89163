"""SQLite, as the embedded store and the local coordinator use it: connections, the file, the change log."""

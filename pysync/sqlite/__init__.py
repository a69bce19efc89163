"""SQLite for the embedded store and the local coordinator: connections, database files and the change log."""

"""The coordinator in Redis, for processes on several machines."""

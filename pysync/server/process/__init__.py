"""The process of a service: sockets, workers, the operators' listener, logs, metrics and background jobs."""

"""What tests share: callers, services, stores and servers that fail on request."""

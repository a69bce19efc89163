"""Helpers of the tests: callers, services, stores and servers that fail on request."""

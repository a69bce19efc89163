"""Handlers of requests, one module for each kind of route."""

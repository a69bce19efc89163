"""Request handlers, one module for each kind of route."""

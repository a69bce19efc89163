"""Webhooks: programs that the server notifies of writes by HTTP, as Standard Webhooks specifies."""

from pysync.webhooks.sender import Webhooks

__all__ = ["Webhooks"]

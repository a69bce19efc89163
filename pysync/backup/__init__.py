"""Backups of a store: consistent snapshots in a folder or a bucket, which share what they have in common.

See docs/explanation/backup.md.
"""

"""Backups of a store: consistent images in a folder or a bucket, which share what they have in common.

See docs/explanation/backup.md.
"""

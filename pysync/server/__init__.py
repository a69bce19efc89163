"""The HTTP service: start reading at `app.py`."""

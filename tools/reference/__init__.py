"""Writes what is generated below docs/, and the configuration's JSON Schema: `python -m tools.reference`."""

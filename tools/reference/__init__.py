"""The pages of docs/reference/ that the code determines: `python -m tools.reference` writes them."""

"""Speed and real input, measured: `run.py` runs all of it, `RESULTS.md` keeps what it printed."""

"""Quotas: who a write counts for, and what is stored for whom. A folder counts in its own transactions
(`store/local/ledger.py`); a bucket is counted by its processes."""

"""Tools for those who work on pysync; none of them is installed."""

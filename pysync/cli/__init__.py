"""The command line: `pysync serve`, and a small client for people and scripts."""

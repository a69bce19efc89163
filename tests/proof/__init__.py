"""Proof that many nodes behave as one: clients write down what they ask and hear, and a judge reads it.

`workload` asks, `history` keeps, `judge` decides; `nodes` starts what is asked, `run` puts it together.
`python -m tests.proof --nodes s3 --seconds 300` is a long run.
"""

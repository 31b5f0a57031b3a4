"""What a change costs where it is served: two servers asked in turn over HTTP, and verdicts in the same words."""

# An interval needs them; `bigpool.bench.stats` has the same, and costs numpy.
MIN_ROUNDS = 8

"""What a change costs: arms timed in turn in one process, and verdicts in words that more repeats would not overturn."""

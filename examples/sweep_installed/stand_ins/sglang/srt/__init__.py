"""What the kernels' modules ask of the rest of sglang."""

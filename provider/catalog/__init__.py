"""What a checkpoint offers to serve."""

"""What was measured, on disk, and what produced it."""

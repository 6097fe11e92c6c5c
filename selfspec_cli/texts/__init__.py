"""Text to prompt with, to fit on and to score."""

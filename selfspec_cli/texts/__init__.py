"""Texts: prompts, and text to fit heads on and to score."""

"""Measuring the engines of a sweep on several GPUs or machines at once."""

"""What a worker can say about the device and about where time goes."""

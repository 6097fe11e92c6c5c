"""What a draft step multiplies by."""

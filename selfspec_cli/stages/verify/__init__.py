"""`selfspec verify`: is the output of an arm the model's own? Shown on the user's model and device."""

"""Exit heads fitted inside a worker, from the hidden states of the loaded model."""

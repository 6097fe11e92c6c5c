"""Files that commands make for a model: exit heads, tuned settings."""

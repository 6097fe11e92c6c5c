"""Files that commands make for a model: exit heads, calibrations, tuned settings."""

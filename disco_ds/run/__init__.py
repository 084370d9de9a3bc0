"""A training run: from its configuration to the last checkpoint."""

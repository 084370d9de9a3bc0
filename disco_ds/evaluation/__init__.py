"""Retrieval and zero-shot accuracy of a model, on any number of ranks."""

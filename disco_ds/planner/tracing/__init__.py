"""Activations of a model, traced on fake tensors: no GPU, no memory."""

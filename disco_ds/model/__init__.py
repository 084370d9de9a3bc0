"""The two towers: building them, activation checkpointing, weights in and out."""

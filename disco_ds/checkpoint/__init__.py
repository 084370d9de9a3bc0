"""Checkpoints that verify: folders and manifests, saving, resuming on other ranks, reading without an engine."""

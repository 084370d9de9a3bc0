"""Shards to batches: the deterministic, resumable training stream, the held-out reader, the embedded default."""

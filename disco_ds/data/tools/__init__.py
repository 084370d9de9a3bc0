"""Making, checking and showing shards."""

"""What a run is: the schema of its options, and how they are read."""

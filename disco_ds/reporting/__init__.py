"""The parts of the report picture: curves, the grid of held-out images, and text that fits."""

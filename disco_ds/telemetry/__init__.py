"""What a run says of itself: console, JSON lines, TensorBoard, Weights & Biases."""

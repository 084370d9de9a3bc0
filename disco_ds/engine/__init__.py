"""All that knows DeepSpeed: its configuration, the engine, the optimizer and the step."""

"""disco-data: make, check, index, show and demo."""

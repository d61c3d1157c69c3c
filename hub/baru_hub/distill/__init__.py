"""Training drafters for a target from text that the target wrote itself."""

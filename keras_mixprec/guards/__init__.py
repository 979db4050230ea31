"""Keeping metrics and layer state finite when a step is skipped."""

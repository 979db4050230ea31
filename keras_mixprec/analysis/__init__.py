"""Offline search for the fewest float32 layers."""

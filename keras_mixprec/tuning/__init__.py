"""Repairing a model while it trains: what `PrecisionTuner` does in a `fit`."""

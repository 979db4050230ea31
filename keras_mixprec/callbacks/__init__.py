"""The callbacks: monitoring a run, and repairing it."""

"""Monitoring a run: its counters, ranges, audits, failing batches, summary."""

"""Judging: which layer cannot bear its precision, why, and what to do."""

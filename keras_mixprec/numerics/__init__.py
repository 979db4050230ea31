"""Measuring: what layers see, compute, and would compute in float32."""

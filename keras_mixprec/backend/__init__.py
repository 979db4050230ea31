"""The only files that import tensorflow, jax or torch."""

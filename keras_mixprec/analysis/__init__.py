"""What is done with a model outside of its training."""

"""Looking at a model before or after training: what could be better."""

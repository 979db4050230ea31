"""Policies side by side: speed, memory and accuracy of the same training."""

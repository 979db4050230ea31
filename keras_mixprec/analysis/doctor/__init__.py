"""What the machine can do in 16 bits, checked and measured before training."""

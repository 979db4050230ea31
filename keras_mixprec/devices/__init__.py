"""What the devices are, which formats they have, and what was measured."""

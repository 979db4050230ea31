"""Which layer is numerically unstable, why, and what to do."""

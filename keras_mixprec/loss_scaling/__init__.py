"""Loss scaling: update rules (pure), gradient health, the optimizer."""

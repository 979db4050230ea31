"""Before and beside training: the doctor, lint, the fewest float32 layers."""

"""Before and beside training: the doctor, the fewest float32 layers."""

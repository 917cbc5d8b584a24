"""What of slime is touched, and whether a checkout has it."""

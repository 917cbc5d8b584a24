"""What is recorded of every rollout, and how it is checked."""

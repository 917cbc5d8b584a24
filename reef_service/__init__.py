"""The HTTP gateway in front of the rollout engines."""

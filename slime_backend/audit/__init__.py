"""Recomputing rollouts' log-probs under the versions that they claim."""

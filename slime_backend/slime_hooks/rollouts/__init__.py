"""Rollout functions behind slime's `--*-path` flags, the calls they wrap, and what they record."""

from slime_backend.slime_hooks.rollouts.functions import filter_stale, generate_rollout, log_rollouts, note_rollout

__all__ = ["filter_stale", "generate_rollout", "log_rollouts", "note_rollout"]

"""`--custom-tis-function-path slime_backend.slime_hooks.importance.correct`: the path that flags name."""

from slime_backend.slime_hooks.rollouts.importance import correct

__all__ = ["correct"]

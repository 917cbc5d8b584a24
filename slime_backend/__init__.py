"""reef-slime: publish new weights to live SGLang rollout engines, and prove that no rollout was poisoned."""

__version__ = "0.1.0"

"""Where bytes come from."""

from slime_backend.weight_sources.base import WeightSource

__all__ = ["WeightSource"]

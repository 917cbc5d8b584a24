"""A small GRPO trainer for a machine without slime: models, verifiable tasks, and the optimisation step."""

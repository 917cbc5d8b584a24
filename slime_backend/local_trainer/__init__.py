"""This package is a small GRPO trainer without slime: verifiable tasks, the optimisation step and the loop."""

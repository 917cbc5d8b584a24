"""W&B and TensorBoard: the figures of a step, of a publication, of a rollout; alerts."""

"""slime's engines: their servers, flags, checkpoints and router."""

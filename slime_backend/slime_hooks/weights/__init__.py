"""Weight updates of slime, routed through the publication transaction."""

"""The files of a run directory: their names, JSON lines, damaged lines, rows."""

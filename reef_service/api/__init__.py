"""The HTTP surface: one file for each API that clients speak."""

"""Measurements side by side with what others do: `reef-slime bench NAME`. catalog.py lists them."""

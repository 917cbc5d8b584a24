"""`python -m slime_backend.cli` is `reef-slime`."""

from slime_backend.cli.app import main

main()

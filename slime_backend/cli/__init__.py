"""This package is the command line `reef-slime`: one file a command."""

from slime_backend.cli.app import main

__all__ = ["main"]

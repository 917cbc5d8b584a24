"""`python -m slime_backend.cli` is `reef-slime`."""

from slime_backend.cli.app import main

if __name__ == "__main__":
    main()

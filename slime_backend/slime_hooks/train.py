"""`python -m slime_backend.slime_hooks.train` for `python train.py`: slime's own loop."""

from slime_backend.slime_hooks.entry import run

if __name__ == "__main__":
    run("train")

"""`python -m slime_backend.slime_hooks.train_async` for `python train_async.py`: slime's own loop."""

from slime_backend.slime_hooks.entry import run

if __name__ == "__main__":
    run("train_async")

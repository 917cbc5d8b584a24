"""reef-slime inside slime: the only package that knows slime's modules.

    python -m slime_backend.slime_hooks.train ...          for  python train.py ...
    python -m slime_backend.slime_hooks.train_async ...    for  python train_async.py ...

slime's own loops and arguments, plus ours. No line of slime is changed: `worker_setup.setup` runs in the driver and, as
Ray's `worker_process_setup_hook`, in every Ray worker before slime is imported there.
"""

"""A job in the CPU mode listens on the loopback only, on ports that no other job of this machine takes.

slime 0.3.1 gives the router SLIME_HOST_IP, its own variable, but the engines and the trainer's rendezvous the outside
address that a Ray worker finds (utils/misc.py:88). And it takes the engines' ports from 15000 upwards by checking which
are free (ray/rollout.py:181), half a minute before the engines listen there: two jobs on one laptop would share them.
"""

from __future__ import annotations

import os
import random
from typing import Any

from slime_backend.cpu import source
from slime_backend.import_hooks import on_import

PORT_VARIABLE = "REEF_SLIME_ENGINE_PORTS"  # the first of a job's ports; the driver draws it, its workers inherit it
SLIME_FIRST_PORT = 15000
# Between Ray's workers and slime's rendezvous (both below 21000) and the ports that the kernel assigns (32768 on).
FIRST, LAST, PER_JOB = 21200, 32000, 300


def install() -> None:
    os.environ.setdefault(PORT_VARIABLE, str(random.SystemRandom().randrange(FIRST, LAST, PER_JOB)))
    on_import("slime.utils.misc", _stay_local)


def _stay_local(module: Any) -> None:
    source.require_in(module, ["def get_current_node_ip():", "def get_free_port(start_port=10000, consecutive=1):"])
    get_free_port = module.get_free_port

    def get_job_port(start_port: int = 10000, consecutive: int = 1) -> int:
        if start_port == SLIME_FIRST_PORT:
            start_port = int(os.environ[PORT_VARIABLE])
        return get_free_port(start_port=start_port, consecutive=consecutive)

    module.get_current_node_ip = lambda: os.environ["SLIME_HOST_IP"]
    module.get_free_port = get_job_port

"""A job on a Ray that runs already: `python -m tests.slime.on_cluster MODULE FLAGS...`, inside the guard of run_job.

The cluster knows nothing of the job: it is started without the variables of slime and of the CPU mode, so a worker has
them from the job or not at all.
"""

from __future__ import annotations

import os
import subprocess
import sys

from slime_backend.engine_process import free_port

FROM_THE_JOB = ("SLIME_SRC", "SLIME_ACCELERATOR", "CUDA_VISIBLE_DEVICES")
START_S = 120.0


def main(module: str, flags: list[str]) -> int:
    port = free_port()
    cluster = {name: value for name, value in os.environ.items() if name not in FROM_THE_JOB}
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head"),
            *("--node-ip-address", "127.0.0.1", "--port", str(port)),
            *("--num-gpus", "2", "--num-cpus", "6", "--include-dashboard", "false"),
            *("--object-store-memory", str(256 * 2**20), "--temp-dir", os.environ["RAY_TMPDIR"]),
        ],
        check=True,
        env=cluster,
        timeout=START_S,
    )
    job = {**os.environ, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    return subprocess.run([sys.executable, "-m", module, *flags], env=job, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

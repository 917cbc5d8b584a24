"""The writer that gets killed: `python -m tests.provenance.ledger_writer RUN_DIR FIRST COUNT SEGMENT_BYTES` appends
records FIRST, FIRST + 1, ... and prints each number once `append` has returned."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slime_backend.ledger.writer import Ledger
from slime_backend.simulation.made_rollouts import made


def main() -> None:
    run_dir, first, count, segment_bytes = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    with Ledger(run_dir, segment_bytes=segment_bytes) as ledger:
        for number in range(first, first + count):
            ledger.append(made(number))
            os.write(1, b"%d\n" % number)  # at once: a buffer would be lost with the process


if __name__ == "__main__":
    main()

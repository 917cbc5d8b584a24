"""Make a contract file from a slime checkout or an unpacked source archive, and print changes from an earlier one.

    python scripts/make_slime_contract.py SLIME_SRC [--commit SHA] > tests/contracts/slime-0.4.0.json
    python scripts/make_slime_contract.py SLIME_SRC --against tests/contracts/slime-0.3.1.json

Nothing of slime is imported. The contract lists the symbols of `--like` and those in
slime_hooks/contract/touched.py. What this package touches and the checkout lacks goes to stderr, and the exit code is
then 1, as it is where `--against` finds differences.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from slime_backend.slime_hooks.contract import touched
from slime_backend.slime_hooks.contract.symbols import ContractError, differences, make_contract, symbols_of

LIKE = Path(__file__).resolve().parent.parent / "tests" / "contracts" / "slime-0.3.1.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SLIME_SRC")
    parser.add_argument("--like", type=Path, default=LIKE, metavar="CONTRACT", help="whose symbols to list")
    parser.add_argument("--against", type=Path, metavar="CONTRACT", help="print what moved since, instead")
    parser.add_argument("--commit", metavar="SHA", help="of an unpacked archive, which doesn't contain it")
    options = parser.parse_args()
    wanted = symbols_of(json.loads(options.like.read_text()))
    for module, names in touched.symbols().items():
        wanted[module] = list(dict.fromkeys([*wanted.get(module, ()), *names]))
    try:
        contract = make_contract(options.source, wanted, commit=options.commit or _commit(options.source))
    except ContractError as error:
        parser.error(str(error))
    found = touched.missing(contract)
    if options.against is not None:
        found += differences(json.loads(options.against.read_text()), contract)
        sys.stdout.write("".join(f"{line}\n" for line in found) or "nothing moved\n")
    else:
        sys.stdout.write(json.dumps(contract, indent=1))
        sys.stderr.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


def _commit(source: Path) -> str | None:
    """The checkout's commit; None for an unpacked archive, and for a directory inside another repository."""
    if not (source / ".git").exists():
        return None
    done = subprocess.run(
        ["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())

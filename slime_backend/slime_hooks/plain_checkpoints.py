"""Takes what reef-slime 0.1 left in slime's checkpoints out of them, so that they load where it isn't installed.

Megatron pickles the run's arguments into every checkpoint, and up to version 0.1 these held an object of ours:
`ModuleNotFoundError: No module named 'slime_backend'` elsewhere, `UnpicklingError` with `weights_only=True` here.

    python -m slime_backend.slime_hooks.plain_checkpoints CHECKPOINT_DIR

Rewrites common.pt and other files of torch.save. Megatron-core 0.19 keeps the arguments in its sharded files instead;
one with an object of ours is named, and a run that loads it and saves again makes it plain. Needs torch and this
package; run it once where the checkpoint was written. Everything else in a file stays as it is.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime_backend.run_files import replace_file

# A class of ours in a pickle of torch.save's protocol 2 (opcode GLOBAL); its archives aren't compressed. A name of a
# function in a flag's value is a string, and stays.
OURS = b"cslime_backend."
SUFFIXES = (".pt", ".distcp")
LEFT = ("reef_policy",)  # attributes of the arguments that were objects of ours


def files_with_ours(root: Path) -> Iterator[Path]:
    """The files of a checkpoint that hold an object of a class of ours."""
    for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
        if path.suffix not in SUFFIXES or not path.is_file() or not path.stat().st_size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(OURS) >= 0:
                yield path


def make_plain(path: Path) -> bool:
    """Write the file again without our attributes of its arguments. Returns whether there were any."""
    import torch

    content: Any = torch.load(path, map_location="cpu", weights_only=False)
    args = content.get("args") if isinstance(content, dict) else None
    found = [name for name in LEFT if hasattr(args, name)]
    for name in found:
        delattr(args, name)
    if found:
        replace_file(path, lambda file: torch.save(content, file), durable=True)
    return bool(found)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m slime_backend.slime_hooks.plain_checkpoints CHECKPOINT_DIR", file=sys.stderr)
        return 2
    root = Path(arguments[0])
    if not root.exists():
        print(f"reef-slime: {root} isn't there; give the directory that slime's --save names", file=sys.stderr)
        return 2
    changed = [path for path in files_with_ours(root) if path.suffix == ".pt" and make_plain(path)]
    for path in changed:
        print(f"reef-slime: {path} holds slime's own arguments alone now")
    left = [path for path in files_with_ours(root) if path not in changed]
    for path in left:
        print(
            f"reef-slime: {path} holds an object of reef-slime outside of the arguments in a .pt file, and is left as "
            "it is; load it with this version installed and save it again"
        )
    if not changed and not left:
        print(f"reef-slime: nothing of reef-slime is in the checkpoints under {root}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

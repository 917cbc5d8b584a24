"""The files of a run: what each is called, and how one is written so that a kill leaves it complete or absent.

    directory.py   RunDir: the name of every file and directory of a run
    replace.py     a file or a directory is written under another name and renamed
    jsonl.py       append-only files of one JSON object per line
    damage.py      what a reading had to leave out
    runs.py        where a new run goes
    rows.py        the rows of these files, with what each must have

Imports nothing of ours but the errors and policy.py.
"""

from slime_backend.run_files.directory import RunDir
from slime_backend.run_files.replace import new_directory, replace_directory, replace_file

__all__ = ["RunDir", "new_directory", "replace_directory", "replace_file"]

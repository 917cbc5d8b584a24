"""What is written is complete or absent, also where it fails half-way, and where two write at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slime_backend.run_files import new_directory, replace_directory, replace_file
from slime_backend.run_files.replace import partial_name, remove_partials


@pytest.mark.parametrize("content", ["new", b"new", lambda file: file.write(b"new")])
@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced(tmp_path: Path, content, durable):
    path = tmp_path / "summary.json"
    path.write_text("old")
    assert replace_file(path, content, durable=durable) == path
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_failed_writing_leaves_the_old_contents_and_nothing_else(tmp_path: Path):
    path = tmp_path / "trainer.pt"
    path.write_text("old")

    def cut_short(file):
        file.write(b"half of the n")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, cut_short)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["trainer.pt"]


def test_two_writers_of_a_file_do_not_mix(tmp_path: Path):
    """A second one begins and ends while the first is at work: with one name for both, the first would go on writing
    into the second one's file."""
    path = tmp_path / "audit.json"

    def slow(file):
        file.write(b"first ")
        file.flush()
        replace_file(path, "second")
        assert path.read_text() == "second"
        file.write(b"ends")

    replace_file(path, slow)
    assert path.read_text() == "first ends"
    assert [p.name for p in tmp_path.iterdir()] == ["audit.json"]


def test_durable_contents_are_on_the_disk_before_they_have_the_name(tmp_path: Path, monkeypatch):
    calls: list[str] = []
    sync, rename = os.fsync, Path.replace

    def noted_sync(descriptor: int) -> None:
        calls.append("file" if os.path.isfile(f"/proc/self/fd/{descriptor}") else "names")
        sync(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(self, target)

    monkeypatch.setattr("os.fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_rename)
    replace_file(tmp_path / "a", "x", durable=True)
    assert calls == ["file", "rename", "names"]
    calls.clear()
    replace_file(tmp_path / "a", "x")
    assert calls == ["rename"]


def test_a_new_directory_is_complete_or_absent(tmp_path: Path):
    target = tmp_path / "weights" / "v1"
    with new_directory(target) as partial:
        (partial / "config.json").write_text("{}")
        assert not target.exists()
    assert [p.name for p in target.iterdir()] == ["config.json"]

    def fill_half(path: Path) -> None:
        with new_directory(path) as partial:
            (partial / "config.json").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_half(tmp_path / "weights" / "v2")
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["v1"]


def test_a_new_directory_leaves_what_exists_as_it_is(tmp_path: Path):
    target = tmp_path / "v1"
    target.mkdir()
    (target / "a user's").write_text("kept")
    with pytest.raises(OSError, match="not empty"), new_directory(target) as partial:
        (partial / "config.json").write_text("{}")
    assert [p.name for p in target.iterdir()] == ["a user's"]
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]


@pytest.mark.parametrize("there", ["nothing", "directory", "link", "file"])
def test_a_directory_is_replaced_in_one_piece(tmp_path: Path, there):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_text("another's")
    target, partial = tmp_path / "3", partial_name(tmp_path / "3", "slime")
    if there == "directory":
        target.mkdir()
        (target / "left.bin").write_text("of another save")
    elif there == "link":
        target.symlink_to(elsewhere, target_is_directory=True)
    elif there == "file":
        target.write_text("x")
    partial.mkdir()
    (partial / "config.json").write_text("{}")
    replace_directory(partial, target)
    assert target.is_dir()
    assert not target.is_symlink()
    assert [p.name for p in target.iterdir()] == ["config.json"]
    assert (elsewhere / "model.safetensors").read_text() == "another's"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "elsewhere"]


def test_what_killed_writers_left_is_removed(tmp_path: Path):
    partial_name(tmp_path / "v1").mkdir()
    (partial_name(tmp_path / "v2") / "deep").mkdir(parents=True)
    other = partial_name(tmp_path / "default")
    other.mkdir()
    (tmp_path / "v1").mkdir()
    remove_partials(tmp_path, "v*")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["v1", other.name])
    remove_partials(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]

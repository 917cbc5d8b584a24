"""A job's name lies in its --save directory, and a checkpoint says which steps are over."""

from __future__ import annotations

import shutil
import types

import pytest

from reef_service.slime_job import NAME_FILE, TRACKER, Job, JobNameError, loaded, name_of


def arguments(**values):
    return types.SimpleNamespace(**values)


def save(directory, step):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / TRACKER).write_text(str(step))


def test_directories_that_are_called_alike_are_two_jobs(tmp_path):
    one, two = name_of(tmp_path / "a" / "ckpt"), name_of(tmp_path / "b" / "ckpt")
    assert one != two
    assert name_of(tmp_path / "a" / ".." / "a" / "ckpt") == one


def test_a_name_moves_with_its_directory_and_a_copy_is_another_job(tmp_path):
    one = name_of(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "moved")
    assert name_of(tmp_path / "moved") == one
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    copy = name_of(tmp_path / "copy")
    assert copy != one
    assert name_of(tmp_path / "moved") == one
    assert name_of(tmp_path / "copy") == copy


def test_a_broken_name_is_one_line(tmp_path):
    (tmp_path / NAME_FILE).write_text("{")
    with pytest.raises(JobNameError, match=f"{NAME_FILE} is no job's name"):
        name_of(tmp_path)


def test_without_a_directory_every_process_is_a_job(tmp_path):
    assert Job.of(arguments(save=None)).name != Job.of(arguments(save=None)).name


def test_what_an_earlier_process_saved_says_nothing_about_this_one(tmp_path):
    """A directory that was used before, and a job that begins anew in it."""
    save(tmp_path, 100)
    job = Job.of(arguments(save=str(tmp_path)))
    assert (job.safe_step(5), job.saved_step()) == (-1, -1)
    save(tmp_path, 4)
    assert (job.safe_step(5), job.safe_step(3), job.saved_step()) == (4, 2, 4)


@pytest.mark.parametrize(("asynchronous", "safe"), [(False, 6), (True, 5)])
def test_without_checkpoints_what_is_trained_on_is_safe(asynchronous, safe):
    assert Job.of(arguments(save=None, reef_asynchronous=asynchronous)).safe_step(7) == safe


def test_the_checkpoint_that_was_loaded(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    save(old, 9)
    name = name_of(old)
    assert loaded(arguments(load=str(old), save=str(new)), 10) == (name, 9)
    assert loaded(arguments(load=str(old), save=str(new)), 4) == (name, 3)  # --ckpt-step 3
    assert loaded(arguments(load=str(old), save=str(new)), 0) is None  # weights only
    assert loaded(arguments(load=str(old), save=str(new)), 12) is None  # not from here
    assert loaded(arguments(load=str(new), save=str(new)), 10) is None
    assert loaded(arguments(load=None, save=str(old)), 10) == (name, 9)

"""Every name of a run's files stands in RunDir: no other module writes one out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_backend.run_files import RunDir
from slime_backend.run_files.directory import remove_weights

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "slime_backend" / "run_files" / "directory.py"
RENAMES = {"rename", "replace", "move"}


def names() -> set[str]:
    """The names that RunDir gives, as regular expressions."""
    run, found = RunDir(Path("run")), set()
    for name, value in vars(RunDir).items():
        if isinstance(value, property):
            found.add(re.escape(getattr(run, name).name))
    numbered = (
        run.engine_log(7),
        run.trainer_log(7),
        run.sealed_rollouts(7, "jsonl"),
        run.sealed_rollouts(7, "parquet"),
    )
    # In an f-string the number is no part of the text: "engine" and ".log".
    return found | {re.sub(r"0*7", r"(\\d|\\{.*\\})*", re.escape(path.name)) for path in numbered}


def texts(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is joined to a path) of every string but docstrings; {} stands for what an f-string
    puts in."""
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    joined = {node.right for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            joined |= set(call.args) if call.func.attr in ("joinpath", "with_name") else set()
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if node in docstrings or node in inside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, node in joined
        elif isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(parts), node in joined


def path_literals(source: str) -> list[str]:
    """Strings of the source that are a path of a run: a file's name by itself, a name that is joined to a path, or one
    behind a slash. A sentence that names a file is none."""
    known = names()
    files = "|".join(name for name in known if "\\." in name)
    every = "|".join(known)
    found = []
    for line, text, joined in texts(ast.parse(source)):
        alone = re.fullmatch(f"({files})|\\.?({files})\\.partial", text)
        if alone or re.search(rf"\}}/({every})\b", text) or (joined and re.fullmatch(f"(.*/)?({every})(/.*)?", text)):
            found.append(f"{line}: {text}")
    return found


def modules() -> list[Path]:
    found = [path for package in ("slime_backend", "reef_service") for path in (ROOT / package).rglob("*.py")]
    assert len(found) > 200
    return [path for path in found if path != PLACE]


def test_no_other_module_writes_out_a_path_of_a_run():
    assert {str(path.relative_to(ROOT)): bad for path in modules() if (bad := path_literals(path.read_text()))} == {}


@pytest.mark.parametrize(
    "planted",
    [
        'run_dir / "steps.jsonl"',
        'FILE = "audit.json"',
        'run_dir / "weights" / version',
        'self.root.joinpath("wandb_id")',
        'run_dir / f"engine{i}.log"',
        'f"{run_dir}/summary.json names them"',
        'f"sqlite:///{run_dir}/gateway.sqlite"',
        'Path(args.reef_run_dir) / "tensorboard"',
        'f".{\'x\'}"; partial = directory / ".trainer.pt.partial"',
        'run_dir / "rollouts/_index.sqlite"',
        'run_dir / "rollouts" / f"{number:06d}.parquet"',
    ],
)
def test_a_planted_path_is_found(planted):
    assert path_literals(planted)


@pytest.mark.parametrize(
    "harmless",
    [
        '"""steps.jsonl has the steps."""',
        'say("its row is in steps.jsonl now")',
        'row["weights"]',
        'tracker == "wandb"',
    ],
)
def test_words_are_no_paths(harmless):
    assert path_literals(harmless) == []


def renames(source: str) -> list[int]:
    """Lines that give a file another name."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in RENAMES
        # str.replace takes two arguments, dataclasses.replace keywords; Path.rename and Path.replace take one.
        and (node.func.attr == "rename" or len(node.args) == (1 if node.func.attr == "replace" else 2))
        and not node.keywords
        and (node.func.attr != "replace" or not (isinstance(node.func.value, ast.Name) and node.func.value.id == "re"))
    ]


def test_what_is_written_under_another_name_and_renamed_stands_once():
    """Whoever else renames has another reason: a rotation, a lock, files inside a directory that isn't complete yet."""
    assert {path.name for path in modules() if renames(path.read_text())} == {
        "replace.py",
        "writer.py",  # of the ledger: the rotation
        "lock.py",  # of the ledger: a holder that is gone
        "wandb_writer.py",  # W&B's directory
        "supervisor.py",  # the log of an engine that ended, before it starts again
        "disk.py",  # filled and removed on threads
        "slime_job.py",  # a job's name, kept only where nobody else has given one meanwhile
        "checkpoint.py",  # weight_sources: inside of what isn't complete yet
    }
    assert renames("partial.rename(run_dir / FILE)")
    assert renames("partial.replace(path)")
    assert not renames('text.replace("a", "b")')


def test_each_name_is_explained_and_no_two_are_the_same():
    run = RunDir(Path("run"))
    paths = [getattr(run, name) for name, value in vars(RunDir).items() if isinstance(value, property)]
    assert len(paths) > 20
    assert len(set(paths)) == len(paths)
    assert all(path.is_relative_to(run.path) for path in paths)
    own = [value for name, value in vars(RunDir).items() if not name.startswith("__") and name != "path"]
    assert all(value.__doc__ for value in own)


def test_the_names_are_those_that_users_know():
    """docs/runs.md has them; a run of an earlier version is read under the same names."""
    run = RunDir(Path("r"))
    known = {
        "submitted.jsonl": run.submitted,
        "rollouts.jsonl": run.rollouts,
        "rollouts": run.ledger,
        "publications.jsonl": run.publications,
        "unusable.jsonl": run.unusable,
        "steps.jsonl": run.steps,
        "steps.superseded.jsonl": run.superseded_steps,
        "staleness.jsonl": run.staleness,
        "weights/v3": run.weights("v3"),
        "trainer.pt": run.trainer_state,
        "deepspeed": run.deepspeed_states,
        "trainer1.log": run.trainer_log(1),
        "audit.json": run.audit,
        "audit.log": run.audit_log,
        "summary.json": run.summary,
        "report.html": run.report,
        "engine0.log": run.engine_log(0),
        "tensorboard": run.tensorboard,
        "gateway.sqlite": run.gateway_store,
        "rollouts/000004.parquet": run.sealed_rollouts(4, "parquet"),
        "rollouts/_000004.jsonl": run.sealed_rollouts(4, "jsonl"),
    }
    assert {name: str(path.relative_to("r")) for name, path in known.items()} == {name: name for name in known}
    docs = (ROOT / "docs" / "runs.md").read_text()
    for name in ("steps.superseded.jsonl", "trainer.pt", "audit.log", "report.html", "staleness.jsonl"):
        assert f"`{name}`" in docs


def test_a_checkpoint_whose_removal_was_cut_short_is_no_version(tmp_path, monkeypatch):
    version = RunDir(tmp_path).weights("v1")
    version.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (version / name).write_text("{}")
    monkeypatch.setattr("shutil.rmtree", lambda path: None)  # a kill here
    remove_weights(version)
    assert [p.name for p in version.iterdir()] == ["model.safetensors"]

"""What this package touches in slime, against the contract file; what moved, named. Without slime: on a made-up tree
that is altered; with SLIME_SRC: the checkout against the file."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime_backend.slime_hooks.contract import touched
from slime_backend.slime_hooks.contract.symbols import FLAGS_KEY, ContractError, differences, make_contract, symbols_of

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = ROOT / "tests" / "contracts" / "slime-0.3.1.json"
OURS = [*(ROOT / "slime_backend" / "slime_hooks").rglob("*.py"), *(ROOT / "slime_backend" / "cpu").rglob("*.py")]


@pytest.fixture(scope="module")
def contract():
    return json.loads(CONTRACT.read_text())


def test_slime_has_everything_that_we_touch(contract):
    assert touched.missing(contract) == []


TREE = {
    "setup.py": 'setup(\n    version="9.9.9",\n)',
    "docker/Dockerfile": "ARG SGLANG_IMAGE_TAG=v0.5.15.post1-cu129\n",
    "slime/utils/arguments.py": """
def add(parser):
    parser.add_argument("--use-tis", action="store_true")
    reset_arg(parser, "--save", type=str)
    parser.add_argument("--hf-checkpoint", type=str)
""",
    "slime/utils/types.py": '''
from dataclasses import dataclass

@dataclass
class Sample(Base):
    index: int | None = None
    metadata: dict = None

    def _apply_meta_info(self, args, meta_info, *, new_token_count=0, **rest):
        """Docs."""

    async def wait(self, first, /, *more): ...

async def generate(args, sample): ...
def helper(): ...
''',
}
SYMBOLS = {"slime.utils.types": ["Sample", "generate"]}


def tree(root: Path, **changed: str) -> Path:
    """The made-up slime below `root`; `changed`: file name without suffix -> (old text, new text)."""
    for name, text in TREE.items():
        for stem, (before, after) in changed.items():
            if Path(name).stem == stem:
                assert before in text
                text = text.replace(before, after)
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_contract_says_what_the_source_says(tmp_path):
    assert make_contract(tree(tmp_path), SYMBOLS, commit="abc") == {
        "slime_commit": "abc",
        "slime_version": "9.9.9",
        "sglang_target": "0.5.15.post1",
        "modules": {
            "slime.utils.types": {
                "file": "slime/utils/types.py",
                "symbols": {
                    "Sample": {
                        "kind": "class",
                        "line": 5,
                        "bases": ["Base"],
                        "methods": {
                            "_apply_meta_info": {
                                "line": 9,
                                "params": ["self", "args", "meta_info", "*", "new_token_count", "**rest"],
                            },
                            "wait": {"line": 12, "params": ["self", "first", "*more"], "async": True},
                        },
                        "fields": ["index", "metadata"],
                    },
                    "generate": {"kind": "function", "line": 14, "params": ["args", "sample"], "async": True},
                },
            }
        },
        FLAGS_KEY: {"--use-tis": 3, "--save": 4, "--hf-checkpoint": 5},
    }


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"types": ("new_token_count=0, **rest", "count=0, **rest")},
            "slime/utils/types.py: Sample._apply_meta_info: parameters (self, args, meta_info, *, new_token_count, "
            "**rest) -> (self, args, meta_info, *, count, **rest)",
        ),
        (
            {"types": ("def _apply_meta_info", "def apply")},
            "slime/utils/types.py: Sample._apply_meta_info: the method is gone",
        ),
        ({"types": ("async def generate", "def generate")}, "slime/utils/types.py: generate: is no longer async"),
        (
            {"types": ("async def generate(args, sample): ...", "")},
            "slime/utils/types.py: generate: the function is gone",
        ),
        (
            {"types": ("    metadata: dict", "    meta: dict")},
            "slime/utils/types.py: Sample: the fields metadata are gone",
        ),
        ({"types": ("Sample(Base)", "Sample(Other)")}, "slime/utils/types.py: Sample: bases (Base) -> (Other)"),
        (
            {"types": ("async def generate(args, sample): ...", "class generate: ...")},
            "slime/utils/types.py: generate: was a function, is a class",
        ),
        ({"arguments": ('"--use-tis"', '"--tis"')}, "slime/utils/arguments.py: --use-tis: the flag is gone"),
    ],
)
def test_what_moved_is_named_with_file_symbol_before_and_after(tmp_path, changed, expected):
    before = make_contract(tree(tmp_path / "a"), SYMBOLS)
    assert differences(before, make_contract(tree(tmp_path / "b", **changed), SYMBOLS)) == [expected]


def test_what_only_moved_its_line_or_only_came_is_no_difference(tmp_path):
    before = make_contract(tree(tmp_path / "a"), SYMBOLS)
    more = {"types": ("\nclass Sample", "\n# a comment\nclass New: ...\n@dataclass\nclass Sample")}
    assert differences(before, make_contract(tree(tmp_path / "b", **more), SYMBOLS)) == []


def test_a_module_that_is_gone_is_named(tmp_path):
    before = make_contract(tree(tmp_path), SYMBOLS)
    (tmp_path / "slime" / "utils" / "types.py").unlink()
    assert differences(before, make_contract(tmp_path, SYMBOLS)) == ["slime/utils/types.py: the module is gone"]


def test_another_directory_is_refused(tmp_path):
    with pytest.raises(ContractError, match=r"is no slime checkout: there is no slime/utils/arguments.py"):
        make_contract(tmp_path, SYMBOLS)


def altered(contract):
    copy = json.loads(json.dumps(contract))
    return copy, copy["modules"]["slime.utils.types"]["symbols"]["Sample"]


def test_a_slime_that_lacks_what_we_touch_is_told_apart_from_one_that_changed_elsewhere(contract):
    copy, sample = altered(contract)
    sample["methods"]["_apply_meta_info"]["params"].remove("new_token_count")
    sample["fields"].remove("remove_sample")
    del copy[FLAGS_KEY]["--use-tis"]
    assert touched.missing(copy) == [
        "slime/utils/types.py: Sample._apply_meta_info: takes (self, args, meta_info, *, pad_missing_top_p, "
        "update_terminal_info) and no longer new_token_count",
        "slime/utils/types.py: Sample: has no field remove_sample",
        "slime/utils/arguments.py: --use-tis: the flag is gone",
    ]
    copy, sample = altered(contract)
    del sample["methods"]["from_dict"]
    assert touched.missing(copy) == []
    assert differences(contract, copy) == ["slime/utils/types.py: Sample.from_dict: the method is gone"]


def names_in(source: str) -> set[str]:
    """Modules of slime, and symbols as module:name, that a source file names: in imports, in strings that are nothing
    but a dotted name of slime's, and as `module.X` inside a function that is given one of slime's modules, by
    `on_import` or in PATCHES."""
    parsed = ast.parse(source)
    found: set[str] = set()
    functions = {n.name: n for n in ast.walk(parsed) if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and is_slime(node.module):
            found |= {f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if is_slime(alias.name)}
        elif isinstance(node, ast.Constant) and is_slime(node.value) and node.value != "slime":
            found.add(node.value)
        given = node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else []
        if len(given) == 2 and isinstance(given[0], ast.Constant) and isinstance(given[1], ast.Name):
            module, patch = given[0].value, functions.get(given[1].id)
            if is_slime(module) and patch is not None:
                found |= {f"{module}:{name}" for name in attributes_of(patch, patch.args.args[0].arg)}
    return found


def is_slime(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"slime(\.\w+)*", name) is not None


def attributes_of(function: ast.FunctionDef, name: str) -> set[str]:
    nodes = [n for n in ast.walk(function) if isinstance(n, ast.Attribute)]
    return {n.attr for n in nodes if isinstance(n.value, ast.Name) and n.value.id == name}


def unlisted(names: set[str]) -> list[str]:
    bound = touched.bound_names()
    listed = {module: [*names, *bound.get(module, ())] for module, names in touched.symbols().items()}
    lost = []
    for name in sorted(names):
        module, _, symbol = name.partition(":")
        if f"{module}.{symbol}" in listed:
            continue  # a module, imported from its package
        if module not in listed or (symbol and symbol not in listed[module]):
            lost.append(name)
    return lost


@pytest.mark.parametrize("path", OURS, ids=lambda p: p.name)
def test_nothing_of_slime_is_touched_unlisted(path):
    assert unlisted(names_in(path.read_text())) == []


def test_the_search_for_unlisted_names_finds_them():
    source = """
from slime.utils.types import Sample, ParamInfo
import slime.ray.rollout
WHERE = "slime.not_listed.module"
def patch(module):
    module.Sample.x = module.ParamInfo
PATCHES = (("slime.utils.types", patch),)
"""
    assert unlisted(names_in(source)) == [
        "slime.not_listed.module",
        *([] if "slime.ray.rollout" in touched.symbols() else ["slime.ray.rollout"]),
        "slime.utils.types:ParamInfo",
    ]


def run_script(*args):
    command = [sys.executable, str(ROOT / "scripts" / "make_slime_contract.py"), *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_the_script_names_what_a_slime_lacks(tmp_path):
    done = run_script(tree(tmp_path))
    assert done.returncode == 1
    assert "slime/utils/types.py: Sample: has no field group_index" in done.stderr
    assert json.loads(done.stdout)["slime_version"] == "9.9.9"


def test_the_script_refuses_another_directory(tmp_path):
    done = run_script(tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path} is no slime checkout" in done.stderr


@pytest.mark.slime
def test_the_checkout_keeps_the_contract(slime_src, contract):
    made = make_contract(slime_src, symbols_of(contract))
    assert touched.missing(made) == []
    assert differences(contract, made) == []


@pytest.mark.slime
def test_the_checkout_imports_the_names_that_we_replace(slime_src):
    for module, names in touched.bound_names().items():
        text = slime_src.joinpath(*module.split(".")).with_suffix(".py").read_text()
        imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
        bound = {alias.asname or alias.name for node in imports for alias in node.names}
        assert set(names) <= bound, module


@pytest.mark.slime
def test_the_script_makes_the_contract_file_anew(slime_src, contract):
    done = run_script(slime_src, "--commit", contract["slime_commit"])
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == contract

"""Grammars that leave no token to sample: every logit is masked, the probabilities are NaN, and SGLang's sampler raises
in the scheduler (0.5.23, srt/layers/sampler.py, torch.multinomial; seen on a real engine as soon as a request of the
same batch has top_p, top_k or min_p).

    root ::= root                   a rule from which no text can be reached
    {"$ref": "#"}                   a reference that leads to nothing but itself

Worked out on a parse that is only as fine as this needs; what it can't read the engine's own compiler refuses.
"""

from __future__ import annotations

import json
import re
from typing import Any

_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<define>::=)|(?P<text>"(?:\\.|[^"\\\n])*")|(?P<set>\[(?:\\.|[^\]\\])*\])"""
    r"""|(?P<repeat>[*+?]|\{[^}]*\})|(?P<open>\(=?)|(?P<close>\))|(?P<or>\|)|(?P<name>[A-Za-z_][\w.-]*)|(?P<other>.)""",
    re.DOTALL,
)
_OPTIONAL = re.compile(r"[*?]|\{\s*0*\s*[,}]")
Alternatives = list[list[str]]  # the names that each alternative needs


def why_dead(kind: str, text: str) -> str:
    """Why a grammar may leave no token; "" where that isn't seen. Of a text that isn't too large (grammar_size.py)."""
    if kind == "ebnf":
        return _rules_without_end(text)
    return _refs_to_themselves(json.loads(text)) if kind == "json_schema" else ""


def _rules_without_end(text: str) -> str:
    rules = _rules(text)
    ends: set[str] = set()
    while True:
        found = {
            name
            for name, alternatives in rules.items()
            if any(all(part in ends or part not in rules for part in needed) for needed in alternatives)
        }
        if found <= ends:
            break
        ends |= found
    endless = [name for name in rules if name not in ends]
    return f"its rule {endless[0][:40]!r} reaches no text" if endless else ""


def _rules(text: str) -> dict[str, Alternatives]:
    """Each rule's alternatives. A group is a rule of its own, named by its place."""
    tokens = [(m.lastgroup or "", m.group(), m.start()) for m in _TOKEN.finditer(text) if m.lastgroup]
    rules: dict[str, Alternatives] = {}
    open_rules: list[str] = []
    for i, (kind, value, at) in enumerate(tokens):
        following = tokens[i + 1] if i + 1 < len(tokens) else ("", "", 0)
        if kind == "name" and following[0] == "define":
            open_rules = [value]
            rules.setdefault(value, []).append([])
        elif not open_rules or kind in ("define", "repeat", "other"):
            continue
        elif kind == "open":
            group = f"({at}"
            rules[open_rules[-1]][-1].append(group)
            rules[group] = [[]]
            open_rules.append(group)
        elif kind == "close" and len(open_rules) > 1:
            group = open_rules.pop()
            if following[0] == "repeat" and _OPTIONAL.match(following[1]):
                rules[group].append([])
        elif kind == "or":
            rules[open_rules[-1]].append([])
        elif kind == "name" and not (following[0] == "repeat" and _OPTIONAL.match(following[1])):
            rules[open_rules[-1]][-1].append(value)
    return rules


def _refs_to_themselves(schema: Any) -> str:
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str) and not _ends(node, schema, ()):
                return f"its $ref {node['$ref'][:40]!r} leads to nothing but itself"
            left += node.values()
        elif isinstance(node, list):
            left += node
    return ""


def _ends(node: Any, schema: Any, path: tuple[str, ...]) -> bool:
    """Return whether something other than references is reached from `node`; `path`: the references on the way."""
    if not isinstance(node, dict):
        return True
    name = node.get("$ref")
    if isinstance(name, str):
        if name in path or len(path) > 64:
            return False
        return _ends(_target(name, schema), schema, (*path, name))
    for choice in ("anyOf", "oneOf"):
        members = node.get(choice)
        if isinstance(members, list) and members:
            return any(_ends(member, schema, path) for member in members[:64])
    members = node.get("allOf")
    return all(_ends(m, schema, path) for m in members[:64]) if isinstance(members, list) else True


def _target(name: str, schema: Any) -> Any:
    """Return what a reference inside of the schema names; None for any other, which the engine judges."""
    if not name.startswith("#"):
        return None
    found = schema
    for part in filter(None, name[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(part)
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found

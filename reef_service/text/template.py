"""A model's chat template, run as transformers runs it.

A chat template is a Jinja program written for transformers' environment (transformers 5, utils/chat_template_utils.py):
sandboxed, blocks trimmed, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, loop controls and
`{% generation %}`. Importing transformers for it costs 700 MB and 14 s, torch included; these lines cost nothing, and a
test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reef_service.errors import bad_request


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote; what it renders is its contents."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own form

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """Raises jinja2.TemplateError for a template that doesn't compile."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special`: names that templates use for tokens, e.g. bos_token."""
        self.source = source
        self._special = dict(special)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        """The conversation as text. Raises ApiError 400 with the template's own words where it refuses it."""
        values = {**self._special, **(options or {})}
        values |= {"messages": messages, "tools": tools or None, "documents": None}
        try:
            return self._template.render(**values, add_generation_prompt=generation_prompt)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise bad_request(f"the model's chat template refuses these messages: {error}", "messages") from error


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)

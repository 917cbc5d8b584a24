"""A model's tokenizer from its directory: tokenizer.json, tokenizer_config.json, the chat template, the end tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Encoding, Tokenizer

from reef_service.text.template import ChatTemplate
from slime_backend.errors import ReefError

# Tags that structure an answer; kept in the text where a tokenizer has them as special tokens.
KEPT_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LAGGING = 32  # tokens that may wait for the rest of a character before they are shown as they are
WINDOW = 24  # tokens that are decoded together
PIECE = 131_072  # characters that are tokenised at once where it is only counted
CUT = 64  # tokens that a piece may have more than it has in its text
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token")


class TokenizerError(ReefError, RuntimeError):
    """The model's directory has no usable tokenizer; one line."""


class TooManyTokens(ReefError):
    """A text has more tokens than it may; `count`: how many, where that is known."""

    def __init__(self, most: int, count: int | None = None) -> None:
        super().__init__(f"more than {most} tokens")
        self.most, self.count = most, count


class ModelTokenizer:
    """Raises TokenizerError."""

    def __init__(self, directory: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            config = _read(directory / "tokenizer_config.json")
            special = {name: _text(config[name]) for name in _SPECIAL if config.get(name)}
            source = _template(directory, config)
            self.template = ChatTemplate(source, special) if source else None
        except (OSError, ValueError, jinja2.TemplateError) as error:
            raise TokenizerError(f"{directory}: no usable tokenizer: {error}") from error
        except Exception as error:  # what the tokenizers library raises has no class of its own
            raise TokenizerError(f"{directory}/tokenizer.json can't be read: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._hidden = frozenset(i for i, token in added.items() if token.special and token.content not in KEPT_TAGS)
        self.size = _embedded(directory) or int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        # No token is of more characters; a normaliser may make one of up to four (NFC, NFKC).
        longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))
        self.longest = longest * (1 if self._tokenizer.normalizer is None else 4)
        self.end_ids = self._ends(directory, special.get("eos_token"))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """`special`: add what the model puts around a text of its own accord (a beginning token, mostly)."""
        ids: list[int] = self._encoded(text, special).ids
        return ids

    def encode_large(self, text: str, most: int, check: Callable[[], None], *, special: bool = False) -> list[int]:
        """`encode` for a thread of its own: first counted in pieces, between each of which `check` may raise.

        Raises TooManyTokens as soon as it is sure that there are more than `most`: what is cut into pieces has hardly
        more tokens than in one, since a cut changes those next to it alone.
        """
        if len(text) > PIECE:
            so_far = 0
            for start in range(0, len(text), PIECE):
                check()
                so_far += len(self._encoded(text[start : start + PIECE], False)) - CUT
                if so_far > most:
                    raise TooManyTokens(most)
        check()
        found = self._encoded(text, special)
        if len(found) > most:
            raise TooManyTokens(most, len(found))
        ids: list[int] = found.ids
        return ids

    def _encoded(self, text: str, special: bool) -> Encoding:
        """Encode without offsets, which take longer than the tokens; other threads run meanwhile."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode without special tokens, but with the tags of an answer."""
        text: str = self._tokenizer.decode([i for i in ids if i not in self._hidden], skip_special_tokens=False)
        return text

    def text_of(self, token: int) -> str:
        """One token as it is written, special or not."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def _ends(self, directory: Path, eos: str | None) -> tuple[int, ...]:
        found = [] if eos is None else [self._tokenizer.token_to_id(eos)]
        for name in ("generation_config.json", "config.json"):
            named = _read(directory / name).get("eos_token_id") if (directory / name).is_file() else None
            found += named if isinstance(named, list) else [named]
        return tuple(dict.fromkeys(int(i) for i in found if i is not None))


def _embedded(directory: Path) -> int | None:
    """Return how many token ids the model knows; often more than its tokenizer does, and it may sample any of them."""
    config = _read(directory / "config.json")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


class TextStream:
    """Token ids to text as they come; an incomplete character waits.

    What came out in pieces equals what comes out at once.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._from = self._shown = 0  # the text of ids[_from:_shown] is `_before`, and is out
        self._before = ""

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that `ids` complete; with `last` whatever is left."""
        self._ids += ids
        # Decoded with some tokens before it: what a token looks like depends on its neighbours.
        now = self._tokenizer.decode(self._ids[self._from :])
        waits = now.endswith("�") and len(self._ids) - self._shown < LAGGING
        if len(now) <= len(self._before) or (waits and not last):
            return ""
        new = now[len(self._before) :]
        self._shown, self._before = len(self._ids), now
        if self._shown - self._from > WINDOW:
            self._from = self._shown - WINDOW // 2
            self._before = self._tokenizer.decode(self._ids[self._from :])
        return new


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = json.loads(path.read_text())
    return data if isinstance(data, dict) else {}


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _template(directory: Path, config: dict[str, Any]) -> str | None:
    own = directory / "chat_template.jinja"
    if own.is_file():
        return own.read_text()
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("default") or next(iter(named.values()), None)
    return found

"""The limits bound what one client may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from reef_service.errors import CONTEXT_EXCEEDED, ApiError, bad_request


@dataclass(frozen=True, slots=True)
class Limits:
    context: int  # tokens of prompt and output together
    prompt: int  # tokens
    output: int  # tokens
    characters: int = 2**62  # of a prompt: more can't be so few tokens
    values: int = 331_072  # members of arrays and objects in a body: token ids, messages, tools
    messages: int = 4096
    stops: int = 16
    stop_length: int = 1024  # characters: each token is compared with them

    @property
    def most(self) -> int:
        """Tokens of a prompt that leaves room for one more."""
        return min(self.prompt, self.context - 1)

    def too_long(self, count: str) -> ApiError:
        return _too_long(f"the prompt has {count} tokens; at most {self.prompt} are taken")

    def check_characters(self, count: int) -> None:
        """Raises ApiError 400 where so many characters can't be as few tokens as may be."""
        if count > self.characters:
            raise _too_long(f"the prompt has {count} characters, which are more than {self.most} tokens in any case")

    def output_for(self, prompt: int, asked: int | None) -> int:
        """Return how many tokens may be sampled. Raises ApiError 400 where there is no room for any."""
        if prompt < 1:
            raise bad_request("the prompt is empty")
        if prompt > self.prompt:
            raise self.too_long(f"{prompt}")
        room = min(self.output, self.context - prompt)
        if room < 1:
            raise _too_long(f"the prompt has {prompt} tokens and leaves no room in a context of {self.context}")
        if asked is None:
            return room
        if asked < 1:
            raise bad_request(f"max_tokens={asked} must be at least 1", "max_tokens")
        return min(asked, room)  # a bound, like any other


def _too_long(message: str) -> ApiError:
    """An agent that gets this code shortens its conversation instead of giving up."""
    return ApiError(400, message, code=CONTEXT_EXCEEDED)

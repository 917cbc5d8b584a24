"""What one client may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from reef_service.errors import bad_request


@dataclass(frozen=True, slots=True)
class Limits:
    context: int  # tokens of prompt and output together
    prompt: int  # tokens
    output: int  # tokens
    messages: int = 4096
    stops: int = 16
    stop_length: int = 1024  # characters: each token is compared with them

    def output_for(self, prompt: int, asked: int | None) -> int:
        """How many tokens may be sampled. Raises ApiError 400 where there is no room for any."""
        if prompt < 1:
            raise bad_request("the prompt is empty")
        if prompt > self.prompt:
            raise bad_request(f"the prompt has {prompt} tokens; at most {self.prompt} are taken")
        room = min(self.output, self.context - prompt)
        if room < 1:
            raise bad_request(f"the prompt has {prompt} tokens and leaves no room in a context of {self.context}")
        if asked is None:
            return room
        if asked < 1:
            raise bad_request(f"max_tokens={asked} must be at least 1", "max_tokens")
        return min(asked, room)  # a bound, like any other

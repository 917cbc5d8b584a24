"""Errors as clients see them: one class; each API gives it the shape that its own clients understand."""

from __future__ import annotations

from typing import Any

from slime_backend.errors import ReefError

_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OPENAI = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
}


CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code for a conversation that is too long


class ApiError(ReefError):
    """This is an answer that is not a success. `message` names what was seen and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float = 0,
        should_retry: bool = True,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after  # seconds; 0: no such header
        self.allow = allow  # the methods that there are instead
        self.should_retry = should_retry  # False: the official clients are asked not to send it again by themselves

    @property
    def headers(self) -> dict[str, str]:
        found = {"retry-after": str(max(1, round(self.retry_after)))} if self.retry_after else {}
        found |= {"allow": self.allow} if self.allow else {}
        return found if self.should_retry else {**found, "x-should-retry": "false"}

    def body(self, path: str) -> dict[str, Any]:
        """Return the body in the shape of the API that `path` belongs to."""
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            # Anthropic has no code for it: its clients look for these words.
            words = f"prompt is too long: {self.message}" if self.code == CONTEXT_EXCEEDED else self.message
            return {"type": "error", "error": {"type": kind, "message": words}}
        kind = _OPENAI.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)

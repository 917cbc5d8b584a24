"""One SGLang engine over HTTP.

client.py          EngineClient: one method for each call that an engine serves
calls.py           how a call is made: its deadline, its second attempt, its errors
stream.py          the answers of a streamed /generate call
weight_session.py  the session around distributed and tensor updates
errors.py          the four errors of a call, and the deadlines
http.py            HTTP/1.1 to one server over kept-alive connections; connection.py is one of them
"""

from slime_backend.engine_client.client import EngineClient
from slime_backend.engine_client.errors import (
    Deadlines,
    EngineError,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUncalled,
    EngineUnreachable,
)
from slime_backend.engine_client.stream import AnswerStream

__all__ = [
    "AnswerStream",
    "Deadlines",
    "EngineClient",
    "EngineError",
    "EngineProtocolError",
    "EngineRefused",
    "EngineTimeout",
    "EngineUncalled",
    "EngineUnreachable",
]

"""What a client is told when something is wrong: a status, and OpenAI's error object.

The rule: 4xx is the client's to change, 429 and 503 say when to come back (`Retry-After`), and there is no 200 with
an incomplete answer in it. A stream that cannot go on ends with an error object and without `[DONE]`.
"""

from __future__ import annotations

from typing import Any

from belayer.errors import BelayerError, EngineUnavailable, RequestRefused, StorageFull, WeightsError

_CODES = {404: "not_found", 405: "method_not_allowed"}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRY_AFTER_S = 2


class Problem(Exception):
    """A request that is answered with an error instead."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str = "", retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        code = self.code or _CODES.get(self.status) or f"http_{self.status}"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def bad(message: str, param: str | None = None, code: str = "invalid_value") -> Problem:
    """The client's mistake."""
    return Problem(400, message, param=param, code=code)


def unsupported(param: str, why: str, what: str = "") -> Problem:
    """A parameter that is known, and cannot be honoured. `what` says which use of it, where others can."""
    return Problem(400, f"{what or param} is not offered: {why}", param=param, code="unsupported_parameter")


def problem_of(error: BaseException) -> Problem:
    """What a client is told about `error`."""
    match error:
        case Problem():
            return error
        case RequestRefused():
            return Problem(400, str(error), code="request_refused")
        case TimeoutError():
            return Problem(
                504, "the request's deadline is over; what was generated in a session is kept", code="timeout"
            )
        case WeightsError():
            return Problem(409, str(error), code="weights")
        case StorageFull() | EngineUnavailable():
            return Problem(503, str(error), code="unavailable", retry_after_s=RETRY_AFTER_S)
        case BelayerError():
            return Problem(503, f"{type(error).__name__}: {error}", code="failed", retry_after_s=RETRY_AFTER_S)
        case _:
            return Problem(500, f"a defect of the gateway: {type(error).__name__}", code="internal")

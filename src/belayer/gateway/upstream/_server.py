"""One external server: whether it can be used, and one completion from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx

from belayer.engine import GenerationRequest
from belayer.errors import ConfigError, RequestRefused
from belayer.gateway.upstream._wires import Interrupted, Kind, Piece, question, read

HEALTH_S = 2.0  # between two looks at a server
_CONNECT_S = 5.0
_BACKOFF_S = 0.5, 15.0


class Server:
    """A server and its circuit: open after a failure, closed again when it has answered `/health`."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        kind, plus, rest = url.partition("+")
        self.kind: Kind | None = kind if plus and kind in ("vllm", "sglang") else None  # type: ignore[assignment]
        self.url = (rest if self.kind else url).rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{url} is no URL of a server", next_step="write http://HOST:PORT, or sglang+http://…")
        self.model = ""
        self.max_model_len = 0
        self.closed = False
        self.in_flight = 0
        self.failures = 0
        self.why = "it was not asked yet"
        self._client = client
        self._retry_at = 0.0

    async def introduce(self) -> None:
        """Learn what it serves. Raises `Interrupted` while it cannot be asked."""
        if self.kind is None:
            found = await self._get("/get_model_info", may_fail=True)
            named = found is not None and "belayer" not in (await self._get("/version", may_fail=True) or {})
            self.kind = "sglang" if named else "vllm"
        card = (await self._get("/v1/models"))["data"][0]
        self.model, self.max_model_len = card["id"], int(card.get("max_model_len") or 0)
        if not self.max_model_len:
            raise ConfigError(f"{self.url} does not say its max_model_len in /v1/models")

    async def look(self) -> None:
        """Ask it how it is, and open or close the circuit."""
        now = asyncio.get_running_loop().time()
        if not self.closed and now < self._retry_at:
            return
        try:
            if not self.model:
                await self.introduce()
            response = await self._client.get(f"{self.url}/health", timeout=_CONNECT_S)
            if response.status_code != 200:
                raise Interrupted(f"/health answers {response.status_code}")
        except (Interrupted, httpx.HTTPError, KeyError, IndexError, ValueError, TypeError) as error:
            self.fail(str(error) or type(error).__name__)
        else:
            self.closed, self.why = True, ""

    def fail(self, why: str) -> None:
        """Open the circuit, each time in a row for longer."""
        low, high = _BACKOFF_S
        self._retry_at = asyncio.get_running_loop().time() + min(low * 2 ** min(self.failures, 10), high)
        self.failures += 1
        self.closed, self.why = False, why

    async def complete(self, request: GenerationRequest, made: list[int]) -> AsyncIterator[Piece]:
        """What follows `made`. Raises `Interrupted` when another server is to go on, `RequestRefused` for a 4xx."""
        assert self.kind is not None
        path, body = question(self.kind, self.model, request, made)
        self.in_flight += 1
        try:
            async with self._client.stream("POST", self.url + path, json=body) as response:
                if response.status_code != 200:
                    await self._refused(response)
                async for piece in read(self.kind, response.aiter_lines()):
                    self.failures = 0
                    yield piece
        except httpx.HTTPError as error:
            raise Interrupted(f"{type(error).__name__}: {error}") from None
        finally:
            self.in_flight -= 1

    async def _refused(self, response: httpx.Response) -> None:
        text = (await response.aread()).decode(errors="replace")[:500]
        status = response.status_code
        if 400 <= status < 500 and status not in (401, 403, 404, 408, 429):
            raise RequestRefused(f"{self.url} refuses the request ({status}): {text}")
        raise Interrupted(f"it answers {status}: {text}")

    async def _get(self, path: str, *, may_fail: bool = False) -> Any:
        try:
            response = await self._client.get(self.url + path, timeout=_CONNECT_S)
        except httpx.HTTPError as error:
            raise Interrupted(f"{type(error).__name__}: {error}") from None
        if response.status_code == 200:
            return response.json()
        if may_fail:
            return None
        raise Interrupted(f"{path} answers {response.status_code}")

    def state(self) -> dict[str, Any]:
        return {"url": self.url, "kind": self.kind, "usable": self.closed, "in_flight": self.in_flight, "why": self.why}

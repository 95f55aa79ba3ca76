"""Calls to a SuperLink, with typed errors where Flower would exit the process."""

import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fedgrad.federation.flower import internals as flower
from fedgrad.federation.flower.connection import Connection, EngineError

_PAUSES = (0.1, 0.3, 1.0)
_LONG = 10.0
Client = TypeVar("Client", bound=flower.ProtobufClient)
Answer = TypeVar("Answer")


_HINTS: dict[int, str] = {
    flower.ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED: " The key is not registered, or a node that "
    "uses it is connected, or was until it died a moment ago.",
}


class Unreachable(EngineError):
    """The SuperLink does not answer, but may later."""


class Denied(EngineError):
    """The SuperLink answers with a refusal."""

    code: int | None = None
    """Flower's number for the reason."""

    @property
    def temporary(self) -> bool:
        """Whether a retry may help: a node that died holds its place for a while."""
        return self.code == flower.ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED


class _Version:
    """Interceptor that tells the SuperLink our Flower version. (Flower's own exits the process on a
    mismatch; here the SuperLink's answer is an ordinary error.)"""

    def __init__(self, component: str) -> None:
        self.headers = dict(
            flower.RuntimeVersionMetadata.from_local_component(component).as_metadata()
        )

    def intercept(
        self, context: flower.ProtobufRequestContext, call_next: flower.ProtobufCall
    ) -> flower.httpx.Response:
        flower.add_headers(context.request, self.headers)
        return call_next(context)


def client(
    kind: type[Client], connection: Connection, component: str, interceptors: Sequence[Any] = ()
) -> Client:
    """Create a client of one of the SuperLink's APIs."""
    try:
        return kind.from_server_address(
            connection.address,
            connection.plaintext,
            connection.root_certificates,
            [_Version(component), *interceptors],
        )
    except ssl.SSLError as error:
        raise Denied(f"The root certificates are of no use: {error}.") from None


def call(method: Callable[[Any], Answer], request: object) -> Answer:
    """Call the SuperLink; retry after a short pause where that may help."""
    begun = time.monotonic()
    for pause in (*_PAUSES, None):
        if time.monotonic() - begun > _LONG:
            pause = None  # too slow to try again
        try:
            return method(request)
        except flower.httpx.HTTPStatusError as error:
            if error.response.status_code in (502, 503, 504) and pause is not None:
                time.sleep(pause)
                continue
            raise _denied(error) from None
        except flower.httpx.TransportError as error:
            if "certificate" in str(error).lower() or "ssl" in str(error).lower():
                raise Denied(
                    f"TLS with the SuperLink fails: {error}. Are these the root certificates of "
                    "its authority, and does its certificate name this host?"
                ) from None
            if pause is None:
                what = str(error).rstrip(".") or type(error).__name__
                raise Unreachable(
                    f"The SuperLink does not answer: {what}. If it speaks TLS, give the root "
                    "certificates."
                ) from None
            time.sleep(pause)
    raise AssertionError("the last pause is None")


def _denied(error: Any) -> Denied:
    stated = flower.FlowerError.from_json(error.response.text)
    if stated is None:
        return Denied(f"The SuperLink refuses: HTTP {error.response.status_code}.")
    details = f" {stated.public_details}" if stated.public_details else ""
    hint = _HINTS.get(stated.code, "")
    denied = Denied(f"The SuperLink refuses: {stated.message}{details} (code {stated.code}){hint}")
    denied.code = stated.code
    return denied


class Heartbeat:
    """A background thread that calls a function every few seconds, until stopped."""

    def __init__(self, beat: Callable[[], None], seconds: float) -> None:
        self._over = threading.Event()
        self.failure: EngineError | None = None

        def run() -> None:
            while not self._over.wait(seconds):
                try:
                    beat()
                    self.failure = None
                except EngineError as failure:
                    self.failure = failure
                except Exception as failure:
                    self.failure = EngineError(f"The heartbeat fails: {failure!r}.")

        threading.Thread(target=run, name="fedgrad-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Stop the heartbeat."""
        self._over.set()

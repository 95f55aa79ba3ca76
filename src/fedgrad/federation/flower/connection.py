"""Connections to a SuperLink: address, certificates, and where plaintext is allowed."""

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedgrad.core.errors import ArgumentError
from fedgrad.federation.protocol.federation_errors import FederationError


class EngineError(FederationError):
    """The engine of a federation is missing, unreachable, or refuses the request."""


@contextmanager
def located() -> Iterator[None]:
    """Add the line of the user's code to errors of the engine."""
    try:
        yield
    except EngineError as error:
        raise type(error).here(str(error)) from error.__cause__


@dataclass(frozen=True)
class Connection:
    """An address and its transport security. Create it with `secured`, which checks it."""

    address: str
    root_certificates: bytes | None = None
    """PEM of the authorities to trust; with None and TLS, those of the system."""
    plaintext: bool = False


def secured(
    address: str, root_certificates: str | Path | None = None, *, insecure: bool = False
) -> Connection:
    """Return the connection to `address`: TLS, except on loopback or with `insecure`.

    On loopback without certificates, the SuperLink is assumed to be a local trial, which uses
    plaintext. Anywhere else, plaintext must be requested explicitly.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or "/" in host:
        raise ArgumentError.here(f"A SuperLink is named as host:port, got {address!r}.")
    if root_certificates is None:
        return Connection(address, plaintext=insecure or is_loopback(host))
    if insecure:
        raise ArgumentError.here("Certificates are for TLS, insecure is for none: give one.")
    return Connection(address, _certificates(root_certificates))


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, independent of the network."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read(path: str | Path, what: str) -> bytes:
    """Return the content of a file that the user named."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ArgumentError.here(f"The {what} cannot be read: {error}.") from None


def _certificates(path: str | Path) -> bytes:
    content = read(path, "file of root certificates")
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise ArgumentError.here(f"{path} holds no PEM certificate.")
    return content

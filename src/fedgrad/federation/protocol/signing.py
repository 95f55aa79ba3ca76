"""The operator's signature on programs, by which sites allow them without knowing each digest."""

from typing import Any

from fedgrad.core.errors import ArgumentError
from fedgrad.federation.protocol.errors import MissingExtra


def make_keys() -> tuple[bytes, bytes]:
    """A new Ed25519 pair: (private key as PEM, for the operator; public key as PEM, for sites)."""
    crypto = _cryptography()
    private = crypto.Ed25519PrivateKey.generate()
    serialization = crypto.serialization
    secret = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return secret, public


def sign(private_key: bytes, digest: str) -> bytes:
    """The operator's signature on a program."""
    crypto = _cryptography()
    try:
        key = crypto.serialization.load_pem_private_key(private_key, password=None)
    except (ValueError, TypeError) as error:
        raise ArgumentError.here(f"The signing key is no private key in PEM: {error}.") from None
    if not isinstance(key, crypto.Ed25519PrivateKey):
        raise ArgumentError.here("The signing key is not an Ed25519 key. Make one: make_keys().")
    return bytes(key.sign(_message(digest)))


def is_signed(public_key: bytes, digest: str, signature: bytes) -> bool:
    """Is this the signature of the holder of that key on this program?"""
    crypto = _cryptography()
    key = crypto.serialization.load_pem_public_key(public_key)
    if not isinstance(key, crypto.Ed25519PublicKey):
        return False
    try:
        key.verify(signature, _message(digest))
    except crypto.InvalidSignature:
        return False
    return True


def _message(digest: str) -> bytes:
    # The prefix keeps a signature from meaning something else elsewhere.
    return b"fedgrad program " + digest.encode()


def _cryptography() -> Any:
    try:
        from types import SimpleNamespace

        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (
            Ed25519PrivateKey,
            Ed25519PublicKey,
        )
    except ImportError:
        raise MissingExtra.here(
            "Signatures need the package cryptography: pip install 'fedgrad[flower]'."
        ) from None
    return SimpleNamespace(
        InvalidSignature=InvalidSignature,
        serialization=serialization,
        Ed25519PrivateKey=Ed25519PrivateKey,
        Ed25519PublicKey=Ed25519PublicKey,
    )

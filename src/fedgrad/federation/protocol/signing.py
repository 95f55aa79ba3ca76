"""Operator signatures on programs, by which sites allow them without listing each digest."""

from typing import Any

from fedgrad.core.errors import ArgumentError, needs


def make_keys() -> tuple[bytes, bytes]:
    """Create an Ed25519 key pair as PEM: (private key for the operator, public key for sites)."""
    _, serialization, ed25519 = _cryptography()
    private = ed25519.Ed25519PrivateKey.generate()
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
    """Return the operator's signature on a program."""
    _, serialization, ed25519 = _cryptography()
    try:
        key = serialization.load_pem_private_key(private_key, password=None)
    except (ValueError, TypeError) as error:
        raise ArgumentError.here(f"The signing key is no private key in PEM: {error}.") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ArgumentError.here("The signing key is not an Ed25519 key. Make one: make_keys().")
    return bytes(key.sign(_message(digest)))


def is_signed(public_key: bytes, digest: str, signature: bytes) -> bool:
    """Return whether the holder of a key has signed this program."""
    exceptions, serialization, ed25519 = _cryptography()
    key = serialization.load_pem_public_key(public_key)
    if not isinstance(key, ed25519.Ed25519PublicKey):
        return False
    try:
        key.verify(signature, _message(digest))
    except exceptions.InvalidSignature:
        return False
    return True


def _message(digest: str) -> bytes:
    # The prefix keeps the signature from being valid in any other context.
    return b"fedgrad program " + digest.encode()


def _cryptography() -> Any:
    with needs("A signature", "flower"):
        from cryptography import exceptions
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    return exceptions, serialization, ed25519

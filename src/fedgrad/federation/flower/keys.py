"""Keys of nodes, as written by ssh-keygen or openssl."""

from pathlib import Path

from fedgrad.core.errors import ArgumentError, needs
from fedgrad.federation.flower.connection import read

with needs("A certificate or key", "flower"):
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec


def new_key() -> ec.EllipticCurvePrivateKey:
    """Create a private key."""
    return ec.generate_private_key(ec.SECP384R1())


def private_key(path: str | Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key from a file that ssh-keygen or openssl wrote."""
    content = read(path, "key")
    openssh = b"OPENSSH PRIVATE KEY" in content
    load = serialization.load_ssh_private_key if openssh else serialization.load_pem_private_key
    try:
        key = load(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ArgumentError.here(f"{path} holds no private key: {error}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ArgumentError.here(f"{path} is no elliptic-curve key: ssh-keygen -t ecdsa -b 384.")
    return key


def public_key(path: str | Path) -> bytes:
    """Read a public key from a file that ssh-keygen wrote; return it as PEM."""
    try:
        key = serialization.load_ssh_public_key(read(path, "key"))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ArgumentError.here(f"{path} holds no public key: {error}.") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ArgumentError.here(f"{path} is no elliptic-curve key: ssh-keygen -t ecdsa -b 384.")
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )

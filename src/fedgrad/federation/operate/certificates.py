"""Certificates and keys for TLS and node authentication. `make_certificates` creates:

authority.crt     trusted by every node and every driver (public)
authority.key     signs certificates; keep it off the network
superlink.crt     the SuperLink's certificate, for the given hosts
superlink.key
secret            lets a driver act as the server of a run
operator.key      signs programs, for sites that allow what the operator signs
operator.pub      named by those sites in their policy
node-0, node-0.pub, node-1, ...     one key pair per node, as created by `ssh-keygen -t ecdsa`
"""

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from fedgrad.core.errors import ArgumentError, needs
from fedgrad.federation.flower.keys import new_key
from fedgrad.federation.protocol.signing import make_keys

with needs("A certificate", "flower"):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_PEM = serialization.Encoding.PEM
_UNENCRYPTED = serialization.NoEncryption()


def make_certificates(
    directory: str | Path,
    hosts: Sequence[str] = ("localhost", "127.0.0.1", "::1"),
    nodes: int = 1,
    days: int = 365,
) -> Path:
    """Create all of them in a directory that has none yet; only the owner can read private keys."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (folder / "authority.key").exists():
        raise ArgumentError.here(
            f"{folder} has an authority already; another one would cut off its nodes. "
            "Name a new folder."
        )
    authority_key, server_key = new_key(), new_key()
    authority = _authority(authority_key, days)
    _write(folder / "authority.crt", authority.public_bytes(_PEM), private=False)
    _write(folder / "authority.key", _pem(authority_key))
    server = _server(server_key, hosts, authority, authority_key, days)
    _write(folder / "superlink.crt", server.public_bytes(_PEM), private=False)
    _write(folder / "superlink.key", _pem(server_key))
    _write(folder / "secret", secrets.token_bytes(32))
    private, public = make_keys()
    _write(folder / "operator.key", private)
    _write(folder / "operator.pub", public, private=False)
    for i in range(nodes):
        make_node_key(folder / f"node-{i}")
    return folder


def make_node_key(path: Path) -> None:
    """Create a key pair for a node: the private key at `path`, the public key at `path`.pub."""
    key = new_key()
    private = key.private_bytes(_PEM, serialization.PrivateFormat.OpenSSH, _UNENCRYPTED)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write(path, private)
    _write(path.with_name(path.name + ".pub"), public + b"\n", private=False)


def _authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedgrad authority")])
    usage = x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _certificate(name, name, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return builder.add_extension(identifier, critical=False).sign(key, hashes.SHA384())


def _server(
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    if not hosts:
        raise ArgumentError.here("Name the hosts under which the SuperLink is reached.")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "SuperLink")])
    builder = _certificate(name, authority.subject, key.public_key(), days)
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = builder.add_extension(names, critical=False)
    builder = builder.add_extension(issuer, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    return builder.add_extension(usage, critical=False).sign(authority_key, hashes.SHA384())


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, _UNENCRYPTED)


def _write(path: Path, content: bytes, private: bool = True) -> None:
    # Created with its final mode; never overwrites an existing file.
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    except FileExistsError:
        raise ArgumentError.here(f"{path} is there already.") from None
    with os.fdopen(number, "wb") as file:
        file.write(content)

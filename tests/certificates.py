"""Authorities and certificates, made for a test."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Files:
    """A certificate and its key."""

    cert: str
    key: str


class Authority:
    """Signs certificates.

    Args:
        directory: Where all files go.
    """

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        certificate = (
            _builder(self._name, self._key, ends=datetime.datetime.now(datetime.UTC) + DAY)
            .issuer_name(self._name)
            .add_extension(constraints, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = str(directory / f"{name}.pem")
        Path(self.file).write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(self, name: str, *, hosts: tuple[str, ...] = (), is_expired: bool = False) -> Files:
        """Write NAME.pem and NAME.key, over those of before.

        Args:
            hosts: Names and addresses that a server with it is reached by.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            _builder(subject, key, ends=now - DAY if is_expired else now + DAY)
            .issuer_name(self._name)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        files = Files(str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key"))
        Path(files.cert).write_bytes(certificate.public_bytes(Encoding.PEM))
        Path(files.key).write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        return files


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, ends: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ends - 3 * DAY)
        .not_valid_after(ends)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)

"""A throwaway certificate authority, and the certificates that it issues for this machine."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "throwaway authority")])
        basic = x509.BasicConstraints(ca=True, path_length=0)
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = self._builder(self._name, self._key.public_key()).add_extension(basic, critical=True)
        self._certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())

    def client(self) -> ssl.SSLContext:
        """Return a client's SSL context that trusts only this authority."""
        pem = self._certificate.public_bytes(serialization.Encoding.PEM).decode()
        return ssl.create_default_context(cadata=pem)

    def issue(self, certificate: Path, key: Path, passphrase: bytes | None = None) -> int:
        """Write a new certificate and key for localhost, and return the certificate's serial number."""
        private = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        addresses = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = self._builder(name, private.public_key()).add_extension(addresses, critical=False)
        signed = builder.add_extension(issuer, critical=False).sign(self._key, hashes.SHA256())
        encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        form = serialization.PrivateFormat.PKCS8
        key.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, encryption))
        certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return signed.serial_number

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=name,
            public_key=key,
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(minutes=1),
            not_valid_after=now + datetime.timedelta(days=1),
        )

"""A chain of certificates of a tester's own, and what C2PA's own reader says of a file."""

import datetime
import io
import json
from pathlib import Path

import pytest

from megadit.infer.media.signing import MEDIA_TYPES


def write_chain(folder: Path, kind: str = "p256") -> tuple[Path, Path]:
    """(certificate with its issuer's, key) of this kind: p256, p384, ed25519 or rsa."""
    pytest.importorskip("c2pa")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    made = {
        "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
        "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
    }
    issuer_key, key, now = made["p256"](), made[kind](), datetime.datetime.now(datetime.UTC)

    def name(text: str) -> x509.Name:
        return x509.Name(
            [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Tests"), x509.NameAttribute(NameOID.COMMON_NAME, text)]
        )

    def certificate(subject: str, public, is_issuer: bool) -> bytes:
        usage = [not is_issuer, False, False, False, False, is_issuer, is_issuer, False, False]
        builder = (
            x509.CertificateBuilder(name("issuer"), name(subject), public, x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(1))
            .not_valid_after(now + datetime.timedelta(9))
            .add_extension(x509.BasicConstraints(is_issuer, None), critical=True)
            .add_extension(x509.KeyUsage(*usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        )
        if not is_issuer:
            uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION])
            builder = builder.add_extension(uses, critical=False)
        return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    paths = folder / f"{kind}.crt", folder / f"{kind}.key"
    leaf, issuer = certificate("signer", key.public_key(), False), certificate("issuer", issuer_key.public_key(), True)
    paths[0].write_bytes(leaf + issuer)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    paths[1].touch(0o600)
    paths[1].write_bytes(key.private_bytes(*form))
    return paths


def state_of(data: bytes, suffix: str) -> str:
    """Valid, Invalid, or none: what C2PA's own reader says."""
    import c2pa

    try:
        reader = c2pa.Reader(MEDIA_TYPES[suffix], io.BytesIO(data))
    except c2pa.C2paError as error:
        return "none" if "ManifestNotFound" in type(error).__name__ or "no JUMBF" in str(error) else "Invalid"
    return reader.get_validation_state()


def manifest_of(data: bytes, suffix: str) -> dict:
    import c2pa

    told = json.loads(c2pa.Reader(MEDIA_TYPES[suffix], io.BytesIO(data)).json())
    return told["manifests"][told["active_manifest"]]

"""C2PA signatures (c2pa.org, specification 2.x) in videos and images: the signer, and that a model generated them.

Off unless options or the environment name a certificate and its key; both stay in their files. A signed file states
that a generative model made it (IPTC's trainedAlgorithmicMedia), and any change to its pixels breaks the signature.
`c2patool FILE` shows it.
"""

import io
import os
import re
import stat
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path

MEDIA_TYPES = {
    ".mp4": "video/mp4",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
}
_VARIABLES = {"c2pa_certificate": "MEGADIT_C2PA_CERTIFICATE", "c2pa_key": "MEGADIT_C2PA_KEY"}
_CERTIFICATE, _KEY = (
    re.compile(b"-----BEGIN (%b)-----.+?-----END \\1-----" % kind, re.DOTALL)
    for kind in (b"CERTIFICATE", b"[A-Z ]*PRIVATE KEY")
)
"""Patterns of certificates and private keys: a PEM file may hold both."""
_CREATED = {
    "action": "c2pa.created",
    "digitalSourceType": "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SigningOptions:
    """Certificate and key to sign files with; by default from environment variables."""

    c2pa_certificate: str = setting(
        "",
        f"certificate chain (PEM) to sign files with (default: ${_VARIABLES['c2pa_certificate']})",
        metavar="PATH",
    )
    c2pa_key: str = setting(
        "", f"private key (PEM) of --c2pa_certificate (default: ${_VARIABLES['c2pa_key']})", metavar="PATH"
    )

    def found(self) -> dict[str, Path]:
        """Name of the option -> its file; {} if nothing is signed.

        Raises:
            UserError: for a certificate without a key, or a key without a certificate.
        """
        paths = {name: getattr(self, name) or os.environ.get(variable, "") for name, variable in _VARIABLES.items()}
        if any(paths.values()) and not all(paths.values()):
            raise UserError("c2pa_certificate and c2pa_key go together: give both, or neither")
        return {name: Path(path).absolute() for name, path in paths.items() if path}


class Marker:
    """Signs files."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises:
        UserError: if c2pa-python is missing, or certificate and key cannot sign.
        """
        try:
            import c2pa
        except ModuleNotFoundError:
            raise UserError("signing needs the library c2pa-python: pip install 'megadit[c2pa]'") from None
        from megadit.infer.media.animations import encode_image

        self._c2pa = c2pa
        try:
            certificates, keys = certificate.read_bytes(), key.read_bytes()
            is_seen = key.stat().st_mode & stat.S_IROTH
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
        # every signed file contains the chain as passed, and would contain a key from the same PEM file
        chain = b"\n".join(block[0] for block in _CERTIFICATE.finditer(certificates))
        secret = found[0] if (found := _KEY.search(keys)) else keys
        if not chain:
            raise UserError(f"{certificate} and {key} cannot sign: the former holds no certificate (PEM)")
        if is_seen:
            print(f"note: every user of this machine may read {key}: chmod 600 {key}", file=sys.stderr, flush=True)
        settings = c2pa.Settings.from_dict({"builder": {"thumbnail": {"enabled": False}}})
        self._context = c2pa.Context(settings)
        self._claim = {
            "claim_generator_info": [{"name": "megadit", "version": metadata.version("megadit")}],
            "assertions": [{"label": "c2pa.actions.v2", "data": {"actions": [_CREATED]}}],
        }
        try:
            info = c2pa.C2paSignerInfo(alg=_algorithm(secret), sign_cert=chain, private_key=secret, ta_url=None)
            self._signer = c2pa.Signer.from_info(info)
            signed = self(encode_image(np.zeros((1, 1, 3), np.uint8), ".png"), ".png")
            state = c2pa.Reader("image/png", io.BytesIO(signed)).get_validation_state()
        except (c2pa.C2paError, ValueError) as error:
            raise UserError(f"{certificate} and {key} cannot sign: {str(error).partition(chr(10))[0]}") from None
        if state == "Invalid":
            raise UserError(f"{certificate} and {key} cannot sign: their signature is not valid")

    def __call__(self, data: bytes, suffix: str) -> bytes:
        """Signs a file of one of the `MEDIA_TYPES`."""
        signed = io.BytesIO()
        self._sign(io.BytesIO(data), signed, suffix)
        return signed.getvalue()

    def mark_file(self, path: Path, suffix: str) -> None:
        """Signs a file in place, without loading it whole."""
        with atomic_path(path) as signed, path.open("rb") as source, signed.open("w+b") as target:
            self._sign(source, target, suffix)

    def _sign(self, source, target, suffix: str) -> None:
        with self._c2pa.Builder(self._claim, self._context) as builder:
            builder.sign(self._signer, MEDIA_TYPES[suffix.lower()], source, target)


def load_marker(options: SigningOptions) -> Marker | None:
    """Load the signer that the options name; None if they name none.

    Raises:
        UserError: as `SigningOptions.found` and `Marker`.
    """
    found = options.found()
    return Marker(found["c2pa_certificate"], found["c2pa_key"]) if found else None


def _algorithm(key: bytes) -> bytes:
    """C2PA's name of a private key's signature algorithm.

    Raises:
        ValueError: for a key that C2PA does not support.
    """
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(key, password=None)
    except TypeError:
        raise ValueError("the key is encrypted") from None
    match private:
        case ed25519.Ed25519PrivateKey():
            return b"ed25519"
        case rsa.RSAPrivateKey():
            return b"ps256"
        case ec.EllipticCurvePrivateKey(curve=curve):
            return {256: b"es256", 384: b"es384", 521: b"es512"}.get(curve.key_size, b"es256")
    raise ValueError("C2PA does not support this type of key: use Ed25519, an elliptic curve, or RSA")

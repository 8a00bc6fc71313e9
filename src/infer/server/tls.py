"""TLS: check a certificate and its key before the port is bound."""

import ssl
from pathlib import Path

from infer.errors import InvalidRequestError


def check_certificate(cert: Path, key: Path) -> None:
    """Raise InvalidRequestError unless the certificate and the key can be read and belong together."""

    def refuse_passphrase() -> str:
        raise InvalidRequestError(f"the key {key} is encrypted: write it without a passphrase (openssl pkey -in FILE)")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidRequestError(f"the key {key} is not that of the certificate {cert}: give its own") from error
        raise InvalidRequestError(f"{cert} and {key} must be a certificate and its key in PEM: {error}") from error
    except OSError as error:
        raise InvalidRequestError(f"{cert} or {key} cannot be read: {error.strerror}") from error

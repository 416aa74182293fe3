"""HTTPS: a TLS context for uvicorn, errors that name the file at fault, and certificates renewed without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl

from uvicorn.config import create_ssl_context

from ferrule import log
from ferrule.config import FrontendConfig
from ferrule.errors import ConfigError

_LOOK_SECONDS = 0.5  # between two looks at the files
_NO_PASSPHRASE = "-"  # an encrypted key is an error, not a question on the terminal

_logger = log.get("api")


def context_of(front: FrontendConfig) -> ssl.SSLContext | None:
    """Return the server's TLS context; None without a certificate.

    Raises ConfigError that names the option or file at fault.
    """
    if not front.ssl_certfile:
        if front.ssl_keyfile or front.ssl_ca_certs or front.ssl_cert_reqs:
            raise ConfigError("The --ssl options need --ssl-certfile.", "HTTPS is on when there is a certificate.")
        return None
    if front.ssl_cert_reqs and not front.ssl_ca_certs:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs, the authorities of client certificates.")
    return _made(front)


def _fault(front: FrontendConfig, error: OSError | ValueError) -> str:
    """Describe an OpenSSL error with the file or option that it is about, which OpenSSL does not name."""
    if not isinstance(error, ssl.SSLError):
        return str(error)
    certificate, key = front.ssl_certfile, front.ssl_keyfile or front.ssl_certfile
    said = str(getattr(error, "reason", None) or error.strerror or error).removesuffix(".")
    if said == "KEY_VALUES_MISMATCH":
        return f"the private key in {key} is not that of the first certificate in {certificate} ({said})"
    reason = f"({said})"
    if not _has_certificate(certificate):
        return f"{certificate} has no certificate in PEM form {reason}"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(str(certificate), front.ssl_keyfile, _NO_PASSPHRASE)
    except ssl.SSLError:
        return f"{key} has no private key in PEM form that can be read without a passphrase {reason}"
    if front.ssl_ca_certs and not _has_certificate(front.ssl_ca_certs):
        return f"{front.ssl_ca_certs} has no certificate in PEM form {reason}"
    return f"--ssl-ciphers {front.ssl_ciphers}: {said}"


def _has_certificate(file: str | None) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
    except ssl.SSLError:
        return False
    return True


def _files(front: FrontendConfig) -> list[str]:
    return [path for path in (front.ssl_certfile, front.ssl_keyfile, front.ssl_ca_certs) if path]


def _made(front: FrontendConfig) -> ssl.SSLContext:
    """Create the TLS context of the --ssl options. Raises ConfigError."""
    files = str(front.ssl_certfile), front.ssl_keyfile, _NO_PASSPHRASE
    options = front.ssl_cert_reqs, front.ssl_ca_certs, front.ssl_ciphers
    try:
        for path in _files(front):
            os.close(os.open(path, os.O_RDONLY))  # the error names the file, as OpenSSL's does not
        return create_ssl_context(*files, ssl.PROTOCOL_TLS_SERVER, *options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The --ssl options do not work: {_fault(front, error)}.",
            "Wanted: PEM files, a certificate chain and its private key without a passphrase.",
        ) from None


def reload(context: ssl.SSLContext, front: FrontendConfig) -> None:
    """Use the present content of the files for new connections.

    Raises ConfigError; the old certificates then stay in use.
    """
    _made(front)  # tried first: a context that was given half of a pair would serve nobody
    context.load_cert_chain(str(front.ssl_certfile), front.ssl_keyfile, _NO_PASSPHRASE)
    if front.ssl_ca_certs:
        context.load_verify_locations(front.ssl_ca_certs)


async def refresh(context: ssl.SSLContext, front: FrontendConfig) -> None:
    """Watch the files for ever, and use changed ones for new connections.

    Files that do not work are logged, and the old certificates stay in use. Client authorities are only added: one that
    is no longer in the file counts until a restart.
    """
    used = last = _marks(front)
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        now, before = _marks(front), last
        last = now
        if now == used or now != before:  # nothing new, or still being written
            continue
        used = now
        try:
            reload(context, front)
            _logger.info("TLS: the changed certificate files are in use")
        except (ConfigError, OSError) as error:
            _logger.error("TLS: the changed certificate files do not work, the old ones stay in use: %s", error)


def _marks(front: FrontendConfig) -> list[tuple[int, int, int]]:
    """Return values that change with the content of the --ssl files; absent files are left out."""
    found = []
    for path in _files(front):
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            found.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
    return found

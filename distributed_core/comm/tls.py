"""TLS contexts: both sides show a certificate of the configured authority.

Host names are not checked, since workers live at addresses that no certificate names. Owns no
settings file; paths or PEM texts come from the configuration. Called by the server.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

__all__ = ["TlsError", "TlsSettings", "client_context", "server_context"]

_VERSIONS: Final = {
    "1.2": ssl.TLSVersion.TLSv1_2,
    "1.3": ssl.TLSVersion.TLSv1_3,
}
_PEM_MARK: Final = "-----BEGIN"


class TlsError(ValueError):
    """The TLS settings cannot be used; the text names the setting."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Certificates as file paths or as PEM texts.

    ``key`` may be None if ``cert`` holds the key too. Versions are ``"1.2"`` or ``"1.3"``.
    """

    ca: str
    cert: str
    key: str | None = None
    ciphers: str | None = None
    min_version: str = "1.2"
    max_version: str | None = None


def server_context(settings: TlsSettings) -> ssl.SSLContext:
    """The context of a listener.

    :raises TlsError: a file or a value is unusable.
    """
    return _context(settings, ssl.PROTOCOL_TLS_SERVER)


def client_context(settings: TlsSettings) -> ssl.SSLContext:
    """The context of outgoing connections.

    :raises TlsError: a file or a value is unusable.
    """
    return _context(settings, ssl.PROTOCOL_TLS_CLIENT)


def _context(settings: TlsSettings, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # Private authorities seldom meet the strict reading of X.509.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.minimum_version = _version("min-version", settings.min_version)
    if settings.max_version is not None:
        context.maximum_version = _version("max-version", settings.max_version)
    if settings.ciphers is not None:
        try:
            context.set_ciphers(settings.ciphers)
        except ssl.SSLError as exc:
            raise TlsError(f"tls ciphers {settings.ciphers!r}: {exc}") from exc
    _load_authority(context, settings.ca)
    _load_certificate(context, settings)
    return context


def _version(setting: str, text: str) -> ssl.TLSVersion:
    version = _VERSIONS.get(str(text))
    if version is None:
        raise TlsError(f"tls {setting} {text!r} is not one of {', '.join(_VERSIONS)}")
    return version


def _load_authority(context: ssl.SSLContext, ca: str) -> None:
    try:
        if _PEM_MARK in ca:
            context.load_verify_locations(cadata=ca)
        else:
            context.load_verify_locations(cafile=ca)
    except (OSError, ssl.SSLError) as exc:
        raise TlsError(f"tls ca-file {_name(ca)}: {exc}") from exc


def _load_certificate(context: ssl.SSLContext, settings: TlsSettings) -> None:
    with ExitStack() as files:
        cert = _as_file(files, settings.cert)
        key = None if settings.key is None else _as_file(files, settings.key)
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as exc:
            names = _name(settings.cert)
            if settings.key is not None:
                names += f" with key {_name(settings.key)}"
            raise TlsError(f"tls cert {names}: {exc}") from exc


def _no_password() -> str:
    """Without it an encrypted key would ask at the terminal and hang a daemon."""
    raise ValueError("the key is encrypted; encrypted keys are not supported")


def _as_file(files: ExitStack, text: str) -> str:
    """The library reads certificates from files alone: write a PEM text to a private one."""
    if _PEM_MARK not in text:
        return text
    handle, path = tempfile.mkstemp(suffix=".pem")
    files.callback(os.unlink, path)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    return path


def _name(text: str) -> str:
    return "(PEM text)" if _PEM_MARK in text else repr(text)

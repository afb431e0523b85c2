"""TLS with a private authority, both ways with stock peers."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import distributed.comm
import pytest
from distributed.core import Server, rpc
from distributed.security import Security

from distributed_core.comm import (
    CommError,
    CommSettings,
    CommStats,
    ConnectionPool,
    TlsError,
    TlsSettings,
    client_context,
    server_context,
)
from tests.wire.support import open_raw, run, serving, until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def certificates(folder: Path, name: str) -> TlsSettings:
    """An authority and one certificate of it."""
    ca, ca_key = folder / f"{name}-ca.pem", folder / f"{name}-ca.key"
    cert, key, request = folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.csr"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", str(ca_key), "-out", str(ca), "-days", "2",
            "-subj", f"/CN={name} authority")  # fmt: skip
    openssl("req", *curve, "-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}")
    openssl("x509", "-req", "-in", str(request), "-CA", str(ca), "-CAkey", str(ca_key),
            "-set_serial", "1", "-out", str(cert), "-days", "2")  # fmt: skip
    return TlsSettings(str(ca), str(cert), str(key))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TlsSettings:
    return certificates(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> TlsSettings:
    return certificates(tmp_path_factory.mktemp("tls"), "strangers")


def stock_security(settings: TlsSettings) -> Security:
    roles = {
        f"tls_{role}_{part}": getattr(settings, part)
        for role in ("client", "scheduler", "worker")
        for part in ("cert", "key")
    }
    return Security(tls_ca_file=settings.ca, require_encryption=True, **roles)


def test_stock_client_of_our_listener(ours: TlsSettings, strangers: TlsSettings) -> None:
    async def main() -> None:
        async with serving({}, ssl_context=server_context(ours)) as listener:
            address = str(listener.addresses[0])
            assert address.startswith("tls://127.0.0.1:")
            arguments = stock_security(ours).get_connection_args("client")
            async with rpc(address, connection_args=arguments) as remote:
                assert await remote.echo(data=b"x" * 500_000) == b"x" * 500_000
                assert listener.connections[0].peer_address.startswith("tls://")
            wrong = stock_security(strangers).get_connection_args("client")
            with pytest.raises(OSError):
                comm = await distributed.comm.connect(address, timeout=1, **wrong)
                await comm.read()
            # Plain bytes are no TLS: that peer is dropped, the next is served.
            reader, writer = await open_raw(listener.port)
            writer.write(b"\x00" * 100)
            assert b"pickle-protocol" not in await reader.read()
            writer.close()
            async with rpc(address, connection_args=arguments) as remote:
                assert await remote.echo(data=1) == 1
            await until(lambda: not listener.connections)

    run(main())


def test_our_pool_to_a_stock_server(ours: TlsSettings, strangers: TlsSettings) -> None:
    async def main() -> None:
        server = Server({"double": lambda x: 2 * x})
        await server.listen(
            "tls://127.0.0.1:0", **stock_security(ours).get_listen_args("scheduler")
        )
        await server
        pool = ConnectionPool(CommSettings(), CommStats(), client_context(ours))
        assert await pool.call(server.address, {"op": "double", "x": 4}) == 8
        await pool.close()
        settings = CommSettings(connect_timeout_seconds=2)
        stranger = ConnectionPool(settings, CommStats(), client_context(strangers))
        with pytest.raises(CommError, match="certificate"):
            await stranger.call(server.address, {"op": "double", "x": 4})
        await server.close()

    run(main())


def test_pem_texts_serve_like_files(ours: TlsSettings) -> None:
    texts = TlsSettings(*(Path(path).read_text() for path in (ours.ca, ours.cert, ours.key or "")))
    context = server_context(texts)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname is False
    joined = TlsSettings(texts.ca, texts.cert + (texts.key or ""))
    assert client_context(joined).minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ca": "/no/such/ca.pem"}, "ca-file '/no/such/ca.pem'"),
        ({"cert": "/no/such.pem"}, "cert '/no/such.pem'"),
        ({"key": None}, "tls cert"),
        ({"ciphers": "NONSENSE"}, "ciphers 'NONSENSE'"),
        ({"min_version": "1.1"}, "min-version '1.1' is not one of 1.2, 1.3"),
        ({"max_version": "2"}, "max-version '2'"),
        ({"ca": "-----BEGIN CERTIFICATE-----\nx"}, r"\(PEM text\)"),
    ],
)
def test_bad_settings_are_named(ours: TlsSettings, change: dict[str, Any], text: str) -> None:
    fields = {name: getattr(ours, name) for name in TlsSettings.__dataclass_fields__}
    with pytest.raises(TlsError, match=text):
        server_context(TlsSettings(**(fields | change)))


def test_plain_listener_is_refused_where_encryption_is_required() -> None:
    async def main() -> None:
        with pytest.raises(CommError, match="encryption is required"):
            async with serving({}, settings=CommSettings(require_encryption=True)):
                pass

    run(main())

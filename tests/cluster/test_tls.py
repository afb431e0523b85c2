"""A cluster over TLS with mutual authentication, from certificates made on the spot."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from distributed import Client
from distributed.security import Security

from tests.cluster import tasks
from tests.cluster.harness import SchedulerProcess, WorkerProcess, wait_until
from tests.cluster.wire import HANDSHAKE, encode

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl CLI")


@dataclass
class Authority:
    """A certificate authority with one certificate that all roles use."""

    ca: str
    cert: str
    key: str

    @property
    def options(self) -> tuple[str, ...]:
        return ("--tls-ca-file", self.ca, "--tls-cert", self.cert, "--tls-key", self.key)

    @property
    def security(self) -> Security:
        return Security(
            tls_ca_file=self.ca,
            tls_client_cert=self.cert,
            tls_client_key=self.key,
            require_encryption=True,
        )


def make_authority(directory: Path) -> Authority:
    def openssl(*arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=30
        )

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req",
        "-x509",
        *curve,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-days",
        "2",
        "-subj",
        "/CN=test authority",
    )
    openssl("req", *curve, "-keyout", "peer.key", "-out", "peer.csr", "-subj", "/CN=peer")
    openssl(
        "x509",
        "-req",
        "-in",
        "peer.csr",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-out",
        "peer.pem",
        "-days",
        "2",
    )
    return Authority(*(str(directory / name) for name in ("ca.pem", "peer.pem", "peer.key")))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def encrypted(authority: Authority) -> Iterator[SchedulerProcess]:
    with SchedulerProcess(*authority.options, scheme="tls") as scheduler:
        workers = [WorkerProcess(scheduler.address, *authority.options) for _ in range(2)]
        try:
            with Client(scheduler.address, security=authority.security, timeout=20) as client:
                client.wait_for_workers(2, timeout=40)
            yield scheduler
        finally:
            for worker in workers:
                worker.stop()


def test_work_over_tls(encrypted: SchedulerProcess, authority: Authority) -> None:
    with Client(encrypted.address, security=authority.security, timeout=20) as client:
        futures = client.map(tasks.inc, range(50))
        assert client.submit(tasks.total, futures).result(timeout=30) == sum(range(1, 51))
        data = client.scatter(b"z" * 3_000_000, broadcast=True)
        assert client.submit(len, data).result(timeout=30) == 3_000_000
        assert client.gather(data, direct=True) == b"z" * 3_000_000
        assert set(client.run(tasks.inc, 1).values()) == {2}
        info = client.scheduler_info(n_workers=-1)
        assert info["address"].startswith("tls://")
        assert all(address.startswith("tls://") for address in info["workers"])


def test_plain_peers_are_refused(encrypted: SchedulerProcess, authority: Authority) -> None:
    with socket.create_connection(("127.0.0.1", encrypted.port), timeout=10) as sock:
        sock.settimeout(10)
        sock.sendall(encode(HANDSHAKE))
        received = b""
        try:
            while data := sock.recv(4096):
                received += data
        except ConnectionError:
            pass
        assert b"pickle-protocol" not in received
    with Client(encrypted.address, security=authority.security, timeout=20) as client:
        assert client.submit(tasks.inc, 1).result(timeout=20) == 2


def _speaks(context: ssl.SSLContext, port: int) -> bool:
    """True if the scheduler talks to this peer after the TLS handshake."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            context.wrap_socket(plain) as sock,
        ):
            sock.sendall(encode(HANDSHAKE))
            return b"pickle-protocol" in sock.recv(4096)
    except (ssl.SSLError, ConnectionError):
        return False


def _context(authority: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca)
    context.check_hostname = False
    return context


def test_peers_without_our_certificate_are_refused(
    encrypted: SchedulerProcess, authority: Authority, stranger: Authority
) -> None:
    known = _context(authority)
    known.load_cert_chain(authority.cert, authority.key)
    assert _speaks(known, encrypted.port)
    assert not _speaks(_context(authority), encrypted.port), "no certificate at all"
    foreign = _context(authority)
    foreign.load_cert_chain(stranger.cert, stranger.key)
    assert not _speaks(foreign, encrypted.port), "a certificate of another authority"
    outdated = _context(authority)
    outdated.load_cert_chain(authority.cert, authority.key)
    outdated.minimum_version = outdated.maximum_version = ssl.TLSVersion.TLSv1_2
    assert _speaks(outdated, encrypted.port)


def test_client_without_certificate_gets_an_error(
    encrypted: SchedulerProcess, stranger: Authority
) -> None:
    with pytest.raises(OSError):
        Client(encrypted.address, security=stranger.security, timeout=2)


@pytest.mark.ours_only
def test_missing_certificate_is_an_error_at_the_start(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.pem")
    options = ("--tls-ca-file", absent, "--tls-cert", absent, "--tls-key", absent)
    with SchedulerProcess(*options, scheme="tls", wait=False) as scheduler:
        assert scheduler.wait(20) != 0
        wait_until(lambda: "absent.pem" in scheduler.output())

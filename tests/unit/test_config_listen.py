"""Where the scheduler listens, from every way to say it."""

import pytest

from distributed_core.config.listen import interface_address
from distributed_core.config.loader import load
from distributed_core.config.schema import ConfigError

INTERFACES = {"eth0": "10.0.0.7", "ib0": "10.1.0.7", "lo": "127.0.0.1"}


@pytest.fixture
def tls(tmp_path):
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text("")
    return {
        f"--tls-{flag}": str(tmp_path / flag.split("-")[0]) for flag in ("ca-file", "cert", "key")
    }


@pytest.fixture
def resolve(tmp_path):
    def resolve(flags=None, **environ):
        environ = {f"DISTRIBUTED_CORE__{name}": value for name, value in environ.items()}
        environ |= {"HOME": str(tmp_path / "home"), "DASK_ROOT_CONFIG": "/nonexistent"}
        return load(
            (),
            flags,
            environ,
            system_directory="/nonexistent",
            interface_address=INTERFACES.__getitem__,
        )

    return resolve


def wire(config):
    return [str(endpoint) for endpoint in config.scheduler.listen]


PLAIN = [
    # flags, addresses, open to others, loopback note
    ({}, ["tcp://127.0.0.1:8786"], False, True),
    ({"--port": "0"}, ["tcp://127.0.0.1:0"], False, True),
    ({"--port": "9000"}, ["tcp://127.0.0.1:9000"], False, True),
    ({"--host": ":9000"}, ["tcp://127.0.0.1:9000"], False, True),
    ({"--host": "tcp://"}, ["tcp://127.0.0.1:8786"], False, True),
    ({"--protocol": "tcp"}, ["tcp://127.0.0.1:8786"], False, True),
    ({"--protocol": "tcp://"}, ["tcp://127.0.0.1:8786"], False, True),
    ({"--host": "127.0.0.1"}, ["tcp://127.0.0.1:8786"], False, False),
    ({"--host": "localhost"}, ["tcp://localhost:8786"], False, False),
    ({"--host": "::1"}, ["tcp://[::1]:8786"], False, False),
    ({"--host": "[::1]:9000"}, ["tcp://[::1]:9000"], False, False),
    ({"--interface": "lo"}, ["tcp://127.0.0.1:8786"], False, False),
    ({"--host": "0.0.0.0"}, ["tcp://0.0.0.0:8786"], True, False),
    ({"--host": "::"}, ["tcp://[::]:8786"], True, False),
    ({"--host": "10.0.0.1:9000"}, ["tcp://10.0.0.1:9000"], True, False),
    ({"--host": "10.0.0.1:9000", "--port": "9000"}, ["tcp://10.0.0.1:9000"], True, False),
    ({"--host": "tcp://head.example.org:1"}, ["tcp://head.example.org:1"], True, False),
    ({"--interface": "eth0", "--port": "1"}, ["tcp://10.0.0.7:1"], True, False),
    (
        {"--interface": "eth0,ib0"},
        ["tcp://10.0.0.7:8786", "tcp://10.1.0.7:8786"],
        True,
        False,
    ),
    (
        {"--protocol": "tcp,tcp"},
        ["tcp://127.0.0.1:8786", "tcp://127.0.0.1:0"],
        False,
        True,
    ),
    (
        {"--protocol": "tcp,tcp", "--port": "1,2", "--interface": "eth0,ib0"},
        ["tcp://10.0.0.7:1", "tcp://10.1.0.7:2"],
        True,
        False,
    ),
]


@pytest.mark.parametrize(("flags", "addresses", "is_open", "noted"), PLAIN)
def test_plain(resolve, flags, addresses, is_open, noted):
    config = resolve(flags)
    assert wire(config) == addresses
    assert config.scheduler.open_plain is is_open
    assert any("can run code on the workers" in text for text in config.warnings) is is_open
    assert any("to open it to the network" in text for text in config.notes) is noted
    assert config.comm.encryption_required is False


@pytest.mark.parametrize(
    ("flags", "addresses"),
    [
        ({}, ["tls://:8786"]),
        ({"--port": "1"}, ["tls://:1"]),
        ({"--host": "10.0.0.1"}, ["tls://10.0.0.1:8786"]),
        ({"--host": "tls://10.0.0.1:7"}, ["tls://10.0.0.1:7"]),
        ({"--protocol": "tls", "--interface": "eth0"}, ["tls://10.0.0.7:8786"]),
        ({"--protocol": "tls,tls"}, ["tls://:8786", "tls://:0"]),
    ],
)
def test_tls_flags_turn_encryption_on(resolve, tls, flags, addresses):
    config = resolve({**tls, **flags})
    assert wire(config) == addresses
    assert config.comm.encryption_required
    assert not config.scheduler.open_plain
    assert config.notes == ()
    assert config.warnings == ()
    assert config.comm.tls.ca_file == tls["--tls-ca-file"]


def tls_variables(tls):
    return {
        "COMM__TLS__CA_FILE": tls["--tls-ca-file"],
        "COMM__TLS__SCHEDULER_CERT": tls["--tls-cert"],
    }


def test_certificates_in_the_configuration_do_not_turn_encryption_on(resolve, tls):
    config = resolve(**tls_variables(tls))
    assert wire(config) == ["tcp://127.0.0.1:8786"]
    assert "there is a certificate in comm.tls" in config.warnings[0]


@pytest.mark.parametrize(
    ("name", "value", "required"),
    [
        ("COMM__REQUIRE_ENCRYPTION", "true", True),
        ("COMM__DEFAULT_SCHEME", "tls", False),
        ("SCHEDULER__PROTOCOL", "tls", False),
    ],
)
def test_settings_that_turn_encryption_on(resolve, tls, name, value, required):
    config = resolve(**tls_variables(tls), **{name: value})
    assert wire(config) == ["tls://:8786"]
    assert config.comm.encryption_required is required


def test_both_protocols_keep_the_plain_one_on_loopback(resolve, tls):
    config = resolve({"--protocol": "tls,tcp", "--port": "1,2"}, **tls_variables(tls))
    assert wire(config) == ["tls://:1", "tcp://127.0.0.1:2"]
    assert not config.scheduler.open_plain
    assert len(config.notes) == 1


MISTAKES = [
    ({"--host": "a", "--interface": "eth0"}, "give scheduler.host (--host) or scheduler.interface"),
    ({"--port": "1,2"}, "scheduler.protocol and scheduler.port (--port) must both be lists"),
    ({"--protocol": "tcp,tcp", "--port": "1"}, "must both be lists of the same length"),
    ({"--protocol": "tcp,tcp", "--host": "a:1"}, "must both be lists of the same length"),
    (
        {"--protocol": "tcp,tcp", "--interface": "eth0,ib0,lo"},
        "scheduler.interface (--interface) and scheduler.protocol (--protocol) must be lists",
    ),
    ({"--host": "a:1", "--port": "2"}, "the port is given twice: 1 in scheduler.host (--host), 2"),
    ({"--protocol": "tcp,tcp", "--port": "1,1"}, "127.0.0.1:1 is used twice"),
    ({"--protocol": "ucx"}, "scheduler.protocol (--protocol): the protocol 'ucx' is not supported"),
    ({"--host": "ws://a"}, "scheduler.host (--host): the protocol 'ws' is not supported"),
    (
        {"--host": "tls://a", "--protocol": "tcp"},
        "says tls://, but scheduler.protocol (--protocol)",
    ),
    ({"--host": "a:b:c"}, "scheduler.host (--host): cannot read 'a:b:c'"),
    ({"--host": "a:99999"}, "scheduler.host (--host): no such port in 'a:99999'"),
    ({"--protocol": "tls"}, "the protocol tls needs comm.tls.ca-file (flag --tls-ca-file)"),
    ({"--tls-key": "/x"}, "the protocol tls needs comm.tls.ca-file (flag --tls-ca-file)"),
]


@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_contradictions_stop(resolve, flags, message):
    with pytest.raises(ConfigError) as caught:
        resolve(flags)
    assert message in str(caught.value)


def test_encryption_that_is_required_cannot_be_left_out(resolve, tls):
    with pytest.raises(ConfigError, match="TLS flags were given, but tcp://127"):
        resolve({**tls, "--protocol": "tcp"})
    with pytest.raises(
        ConfigError, match=r"\(DISTRIBUTED_CORE__COMM__REQUIRE_ENCRYPTION\) is true"
    ):
        resolve({"--host": "tcp://a"}, COMM__REQUIRE_ENCRYPTION="true")


def test_a_certificate_that_is_missing_stops(resolve, tls):
    with pytest.raises(
        ConfigError, match=r"--tls-key: comm.tls.scheduler-key: there is no file '/x'"
    ):
        resolve({**tls, "--tls-key": "/x"})


def test_pem_text_needs_no_file(resolve):
    pem = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    config = resolve({"--protocol": "tls"}, COMM__TLS__CA_FILE=pem, COMM__TLS__SCHEDULER_CERT=pem)
    assert wire(config) == ["tls://:8786"]


HTTP = [
    ({}, {}, ["http://127.0.0.1:8787"]),
    ({"--host": "10.0.0.1"}, {}, ["http://10.0.0.1:8787"]),
    ({"--host": "10.0.0.1"}, {"HTTP__ADDRESS": ":1"}, ["http://10.0.0.1:1"]),
    ({"--dashboard-address": ":8787"}, {}, ["http://0.0.0.0:8787"]),
    ({"--dashboard-address": "8787"}, {}, ["http://0.0.0.0:8787"]),
    ({"--dashboard-address": "0"}, {}, ["http://0.0.0.0:0"]),
    ({"--dashboard-address": "localhost:1"}, {}, ["http://localhost:1"]),
    ({"--dashboard-address": "localhost"}, {}, ["http://localhost:0"]),
    ({"--dashboard-address": "[::1]:1"}, {}, ["http://[::1]:1"]),
    ({"--dashboard-address": ":1,a:2"}, {}, ["http://0.0.0.0:1", "http://a:2"]),
    ({"--dashboard": False}, {}, ["http://127.0.0.1:8787"]),
    ({}, {"HTTP__ENABLED": "false"}, []),
]


@pytest.mark.parametrize(("flags", "environ", "addresses"), HTTP)
def test_http(resolve, flags, environ, addresses):
    config = resolve(flags, **environ)
    assert [str(endpoint) for endpoint in config.http.listen] == addresses


def test_http_follows_a_wire_on_every_interface(resolve, tls):
    [endpoint] = resolve(tls).http.listen
    assert endpoint == ("http", "", 8787)


def test_https(resolve, tls):
    [endpoint] = resolve(HTTP__TLS__CERT=tls["--tls-cert"]).http.listen
    assert endpoint.scheme == "https"
    with pytest.raises(ConfigError, match=r"http.tls.cert: there is no file '/x'"):
        resolve(HTTP__TLS__CERT="/x")


@pytest.mark.parametrize("text", ["a:b", "http://a:1", "::1:8787", "a:99999", "1,,2", "a b:1"])
def test_an_address_for_http_that_cannot_be_read_stops(resolve, text):
    with pytest.raises(ConfigError, match=r"--dashboard-address: http.address: "):
        resolve({"--dashboard-address": text})


def test_interfaces_of_this_machine():
    with pytest.raises(ValueError, match="no network interface 'nope-0'; this machine has "):
        interface_address("nope-0")

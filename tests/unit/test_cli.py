"""The command line: flags become settings, and what is refused says why."""

import argparse
import subprocess
import sys
import types

import pytest

from distributed_core.cli import main as program
from distributed_core.cli import scheduler
from distributed_core.config.flags import FLAGS


@pytest.fixture(autouse=True)
def hermetic(monkeypatch, tmp_path):
    """A user without configuration, whatever this machine has."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("DASK_ROOT_CONFIG", str(tmp_path / "dask"))
    monkeypatch.delenv("DASK_CONFIG", raising=False)
    monkeypatch.delenv("DASK_INTERNAL_INHERIT_CONFIG", raising=False)


@pytest.fixture
def started(monkeypatch):
    """The configurations that a server was started with; each run ends with status 7."""
    configs = []
    app = types.ModuleType("distributed_core.server.app")
    app.run = lambda config: configs.append(config) or 7
    monkeypatch.setitem(sys.modules, "distributed_core.server.app", app)
    monkeypatch.setattr("distributed_core.server.app", app, raising=False)
    monkeypatch.setattr("distributed_core.config.logs.setup", lambda settings: None)
    return configs


def run(*argv):
    return program.main(["scheduler", *argv])


def refuse(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        program.main(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_flags_become_settings(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).write_text("")
    status = run(
        *("--host", "tls://127.0.0.1", "--port", "0", "--tls-ca-file", "ca.pem"),
        *("--tls-cert=cert.pem", "--tls-key", "key.pem", "--dashboard-address", ":0"),
        *("--dashboard-prefix", "x", "--no-dashboard", "--pid-file", "p", "--scheduler-file", "s"),
        *("--idle-timeout", "1h", "--log-level", "DEBUG", "--log-format", "json", "--no-jupyter"),
    )
    [config] = started
    assert status == 7
    assert [str(endpoint) for endpoint in config.scheduler.listen] == ["tls://127.0.0.1:0"]
    assert [str(endpoint) for endpoint in config.http.listen] == ["http://0.0.0.0:0"]
    assert config.http.prefix == "/x"
    assert config.http.dashboard is False
    assert config.scheduler.pid_file == "p"
    assert config.scheduler.scheduler_file == "s"
    assert config.scheduler.idle_timeout == 3600.0
    assert config.logging.level == "debug"
    assert config.logging.format == "json"
    assert config.comm.tls.ca_file == str(tmp_path / "ca.pem")
    assert config.comm.tls.scheduler_key == str(tmp_path / "key.pem")
    assert config.origins["scheduler.port"].text == "--port"


def test_every_flag_of_the_table_is_there():
    for flag in FLAGS:
        argv = ["--dashboard"] if flag == "--dashboard" else [flag, "value"]
        parser = argparse.ArgumentParser()
        scheduler.add_arguments(parser)
        request = scheduler.read_request(parser, *parser.parse_known_args(argv))
        assert list(request.flags) == [flag]


def test_flags_that_are_empty_say_nothing(started):
    """Deployers pass on empty values for what nobody set."""
    empty = ("--host", "", "--pid-file", "", "--scheduler-file", "", "--dashboard-prefix", "")
    assert run(*empty, "--dashboard-address", "", "--idle-timeout", "") == 7
    [config] = started
    assert {origin.kind for origin in config.origins.values()} == {"default"}


def test_config_files_in_order(started, tmp_path):
    paths = [tmp_path / name for name in ("a.yaml", "b.yaml")]
    paths[0].write_text("scheduler: {allowed-failures: 1, idle-timeout: 1s}")
    paths[1].write_text("scheduler: {allowed-failures: 2}")
    assert run("--config", str(paths[0]), "--config", str(paths[1]), "--idle-timeout", "2s") == 7
    [config] = started
    assert config.scheduler.allowed_failures == 2
    assert config.scheduler.idle_timeout == 2.0


def test_notes_and_warnings_are_logged(started, caplog):
    with caplog.at_level("INFO"):
        run("--show", "--use-xheaders", "True")
        run("--host", "0.0.0.0")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said[0][0] == "INFO"
    assert "to open it to the network" in said[0][1]
    assert said[1:3] == [
        ("WARNING", "--show is deprecated and has no effect"),
        ("WARNING", "--use-xheaders is deprecated and has no effect"),
    ]
    assert "can run code on the workers" in said[3][1]


@pytest.mark.parametrize("command", ["scheduler", "check-config"])
@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--preload", "my.module"], "--preload is not supported yet"),
        (["--preload=my.module", "--their-flag", "1"], "--preload is not supported yet"),
        (["--their-flag", "1", "--preload", "my.module"], "--preload is not supported yet"),
        (["--jupyter"], "--jupyter is not supported yet"),
        (["--prot", "tls"], "unknown option --prot; did you mean --port?"),
        (["--schedule-file=x"], "unknown option --schedule-file; did you mean --scheduler-file?"),
        (["--zzz"], "unknown option --zzz"),
        (["tcp://a"], "unexpected argument 'tcp://a'"),
        (["--port"], "argument --port: expected one argument"),
    ],
)
def test_what_is_refused(capsys, started, command, argv, reason):
    line = refuse(capsys, command, *argv)
    assert line.startswith(f"distributed-core {command}: error: {reason}")
    assert started == []


def test_an_unknown_command_is_refused(capsys):
    assert "invalid choice: 'schedul'" in refuse(capsys, "schedul")
    assert "COMMAND" in refuse(capsys)


@pytest.mark.parametrize("command", ["scheduler", "check-config"])
def test_a_bad_configuration_is_status_1(capsys, started, tmp_path, command):
    path = tmp_path / "a.yaml"
    path.write_text("scheduler:\n  prot: 1\n")
    assert program.main([command, "--config", str(path), "--port", "http"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "distributed-core: the configuration cannot be used:",
        f"  {path}:2: unknown setting 'scheduler.prot'; did you mean 'scheduler.port'?",
        "  --port: scheduler.port: expected a port from 0 to 65535, or a list of them, got 'http'",
    ]
    assert started == []


def test_check_config_prints_the_result_with_its_origins(capsys, tmp_path, monkeypatch):
    path = tmp_path / "a.yaml"
    path.write_text("scheduler:\n  worker-ttl: 90s\n")
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__BANDWIDTH", "1 GB")
    assert program.main(["check-config", "--config", str(path), "--port", "0"]) == 0
    printed = capsys.readouterr()
    lines = [" ".join(line.split()) for line in printed.out.splitlines()]
    assert f"worker-ttl: 90s # {path}:2" in lines
    assert "bandwidth: 1GB/s # DASK_DISTRIBUTED__SCHEDULER__BANDWIDTH" in lines
    assert "port: 0 # --port" in lines
    assert "# listens on tcp://127.0.0.1:0" in lines
    assert printed.err == ""


@pytest.mark.parametrize("argv", [["--version"], ["scheduler", "--version"]])
def test_version(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        program.main(argv)
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("distributed-core, version ")


def test_the_command_alone(started):
    assert scheduler.main(["--port", "0"]) == 7


def test_what_the_command_line_imports():
    """Start-up stays cheap, and nothing of Dask gets in."""
    code = (
        "import sys\n"
        "from distributed_core.cli.main import main\n"
        "status = main(['check-config'])\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "banned = {'dask', 'distributed', 'cloudpickle', 'tornado', 'psutil', 'click'}\n"
        "sys.exit(str(names & banned) if names & banned else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

"""Sources of settings: order, translation of Dask's, and what is said about mistakes."""

import base64
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distributed_core.config import dask_keys
from distributed_core.config.flags import FLAGS
from distributed_core.config.kinds import MappingOf
from distributed_core.config.loader import (
    dask_files,
    defaults_path,
    environment_name,
    load,
    own_files,
)
from distributed_core.config.report import render
from distributed_core.config.schema import SECTIONS, SETTINGS, ConfigError, Origin


class Sandbox:
    """Directories of a user who has nothing but what a test writes."""

    def __init__(self, root):
        self.root = root
        self.environ = {"HOME": str(root / "home"), "DASK_ROOT_CONFIG": str(root / "dask")}

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def system(self, text, name="a.yaml"):
        return self.write(f"system/{name}", text)

    def user(self, text, name="a.yaml"):
        return self.write(f"home/.config/distributed-core/{name}", text)

    def dask(self, text, name="a.yaml"):
        return self.write(f"dask/{name}", text)

    def load(self, config_files=(), flags=None, **environ):
        return load(
            config_files,
            flags,
            {**self.environ, **environ},
            system_directory=str(self.root / "system"),
            interface_address={"eth0": "10.0.0.7", "lo": "127.0.0.1"}.__getitem__,
        )

    def problems(self, *arguments, **options):
        with pytest.raises(ConfigError) as caught:
            self.load(*arguments, **options)
        return str(caught.value).splitlines()

    def problem(self, *arguments, **options):
        [line] = self.problems(*arguments, **options)
        return line


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


def inherited(config):
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode()


def flatten(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# Defaults


def test_every_setting_has_a_default_and_every_default_a_setting():
    tree = yaml.safe_load(Path(defaults_path()).read_text())
    found = set()
    for key, _ in flatten(tree):
        parents = [setting for setting in SETTINGS if key.startswith(setting + ".")]
        found.add(parents[0] if parents else key)
    assert found == set(SETTINGS)


def test_defaults(sandbox):
    config = sandbox.load()
    assert config.scheduler.worker_ttl == 300.0
    assert config.scheduler.bandwidth == 100_000_000
    assert config.scheduler.default_data_size == 1024
    assert config.scheduler.worker_saturation == 1.1
    assert config.scheduler.default_task_durations["split-shuffle"] == 1e-6
    assert config.scheduler.idle_timeout is None
    assert config.comm.max_handshake_bytes == 65536
    assert config.engine.validate == "off"
    assert config.gc.thresholds == (50_000, 50, 1000)
    assert config.security.allow_code_on_scheduler is False
    assert config.warnings == ()
    assert config.unknown_dask_keys == ()
    assert set(config.origins) >= set(SETTINGS)
    assert {origin.text for origin in config.origins.values()} == {"default"}


def test_defaults_agree_with_those_of_dask(sandbox):
    """A key that we follow must not change a thing when Dask's own default is written down."""
    spec = importlib.util.find_spec("distributed")
    text = Path(spec.submodule_search_locations[0], "distributed.yaml").read_text()
    sandbox.dask(text)
    config, plain = sandbox.load(), sandbox.load(DASK_ROOT_CONFIG="/nonexistent")
    for name in ("scheduler", "comm", "http", "metrics", "logging", "engine", "security"):
        assert getattr(config, name) == getattr(plain, name)
    assert config.warnings == ()


def test_sections_are_frozen(sandbox):
    config = sandbox.load()
    with pytest.raises(AttributeError):
        config.scheduler.worker_ttl = 1


def test_the_example_for_production_is_valid(sandbox):
    text = Path(defaults_path()).with_name("production.yaml").read_text()
    for name in ("ca.pem", "scheduler.pem", "scheduler.key"):
        sandbox.write(f"tls/{name}", "")
    path = sandbox.write(
        "production.yaml", text.replace("/etc/distributed-core/tls", str(sandbox.root / "tls"))
    )
    config = sandbox.load([path])
    assert [endpoint.scheme for endpoint in config.scheduler.listen] == ["tls"]
    assert config.comm.encryption_required
    assert config.logging.format == "json"
    assert config.logging.levels == {"distributed_core.comm": "warning"}


# Order of sources


def test_later_sources_win(sandbox):
    """One setting, given by ever more sources: each new one takes over."""
    key = "distributed.scheduler.allowed-failures"
    environ = {}
    flags = {}
    files = []

    def now():
        config = sandbox.load(files, flags, **environ)
        return config.scheduler.allowed_failures, config.origins["scheduler.allowed-failures"].text

    assert now() == (3, "default")
    path = sandbox.dask("distributed:\n  scheduler:\n    allowed-failures: 10\n")
    assert now() == (10, f"{path}:3")
    environ["DASK_INTERNAL_INHERIT_CONFIG"] = inherited(
        {"distributed": {"scheduler": {"allowed-failures": 11}}}
    )
    assert now() == (11, "DASK_INTERNAL_INHERIT_CONFIG")
    path = sandbox.system("scheduler:\n  allowed-failures: 12\n")
    assert now() == (12, f"{path}:2")
    path = sandbox.user("scheduler:\n\n  allowed-failures: 13\n")
    assert now() == (13, f"{path}:3")
    environ["DASK_" + key.upper().replace(".", "__").replace("-", "_")] = "14"
    assert now() == (14, "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES")
    environ["DISTRIBUTED_CORE__SCHEDULER__ALLOWED_FAILURES"] = "15"
    assert now() == (15, "DISTRIBUTED_CORE__SCHEDULER__ALLOWED_FAILURES")
    files.append(sandbox.write("one.yaml", "scheduler: {allowed-failures: 16}"))
    assert now() == (16, f"{files[-1]}:1")
    files.append(sandbox.write("two.yaml", "scheduler: {allowed-failures: 17}"))
    assert now() == (17, f"{files[-1]}:1")
    assert "--idle-timeout" in FLAGS
    flags["--idle-timeout"] = "1h"
    assert sandbox.load(files, flags, **environ).origins["scheduler.idle-timeout"] == Origin(
        "flag", "--idle-timeout"
    )


def test_files_of_a_directory_are_read_by_name(sandbox):
    sandbox.user("scheduler: {allowed-failures: 2}", "b.yaml")
    sandbox.user("scheduler: {allowed-failures: 1}", "a.yaml")
    sandbox.user("nonsense: [", "notes.txt")
    assert sandbox.load().scheduler.allowed_failures == 2


def test_the_users_directory_follows_xdg(sandbox, tmp_path):
    path = sandbox.write("xdg/distributed-core/a.yaml", "")
    assert own_files({"XDG_CONFIG_HOME": str(tmp_path / "xdg")}, "/nonexistent") == [path]


def test_empty_files_and_sections_change_nothing(sandbox):
    sandbox.system("")
    sandbox.user("# nothing\nscheduler:\n  # worker-ttl: 1s\n")
    assert sandbox.load().scheduler == Sandbox(sandbox.root / "other").load().scheduler


def test_mappings_are_merged_entry_by_entry(sandbox):
    path = sandbox.system(
        "scheduler:\n  default-task-durations:\n    inc: 1s\n    split-stage: 2s\n"
    )
    config = sandbox.load(
        DISTRIBUTED_CORE__SCHEDULER__DEFAULT_TASK_DURATIONS="{dec: 3s}",
        DASK_DISTRIBUTED__SCHEDULER__DEFAULT_TASK_DURATIONS__OTHER="4s",
    )
    durations = config.scheduler.default_task_durations
    assert durations == {
        "rechunk-split": 1e-6,
        "split-shuffle": 1e-6,
        "split-taskshuffle": 1e-6,
        "split-stage": 2.0,
        "inc": 1.0,
        "dec": 3.0,
        "other": 4.0,
    }
    prefix = "scheduler.default-task-durations."
    assert config.origins[prefix + "inc"].text == f"{path}:3"
    assert config.origins[prefix + "split-stage"].text == f"{path}:4"
    assert config.origins[prefix + "rechunk-split"].text == "default"
    assert config.origins[prefix + "dec"].text.startswith("DISTRIBUTED_CORE__")


# Our environment


ENVIRONMENT = {
    "scheduler.port": ("8786,0", (8786, 0)),
    "scheduler.host": ("[::1]", "[::1]"),
    "scheduler.idle-timeout": ("none", None),
    "scheduler.work-stealing": ("False", False),
    "scheduler.worker-saturation": ("inf", float("inf")),
    "comm.require-encryption": ("null", None),
    "engine.validate": ("turn", "turn"),
    "http.address": (":8788", (("", 8788),)),
    "logging.levels": ("{distributed_core.comm: DEBUG}", {"distributed_core.comm": "debug"}),
    "security.blocked-handlers": ("feed, run_function", ("feed", "run_function")),
    "gc.thresholds": ("1, 2, 3", (1, 2, 3)),
    "materializer.memory-limit": ("0", None),
}


@pytest.mark.parametrize("setting", ENVIRONMENT)
def test_environment(sandbox, setting):
    raw, expected = ENVIRONMENT[setting]
    extra = {"scheduler.port": {"DISTRIBUTED_CORE__SCHEDULER__PROTOCOL": "tcp,tcp"}}
    config = sandbox.load(**{environment_name(setting): raw}, **extra.get(setting, {}))
    section, name = setting.split(".")
    assert getattr(getattr(config, section), name.replace("-", "_")) == expected
    assert config.origins[setting].text == environment_name(setting)


def test_an_unknown_variable_of_ours_stops(sandbox):
    line = sandbox.problem(DISTRIBUTED_CORE__SCHEDULER__WORKER_TLL="1s")
    assert line == (
        "DISTRIBUTED_CORE__SCHEDULER__WORKER_TLL: unknown setting 'scheduler.worker-tll'; "
        "did you mean 'DISTRIBUTED_CORE__SCHEDULER__WORKER_TTL'?"
    )


def test_a_bad_variable_of_ours_stops(sandbox):
    line = sandbox.problem(DISTRIBUTED_CORE__SCHEDULER__PORT="http")
    assert line.startswith("DISTRIBUTED_CORE__SCHEDULER__PORT: scheduler.port: expected a port")
    assert line.endswith("got 'http'")


def test_every_setting_has_a_variable_of_its_own():
    assert len({environment_name(setting) for setting in SETTINGS}) == len(SETTINGS)


# Mistakes in our files


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "scheduler:\n  prot: 1\n",
            2,
            "unknown setting 'scheduler.prot'; did you mean 'scheduler.port'?",
        ),
        (
            "scheduler:\n  worker_ttl: 1s\n",
            2,
            "unknown setting 'scheduler.worker_ttl'; did you mean 'scheduler.worker-ttl'?",
        ),
        ("schedular:\n  port: 1\n", 1, "unknown section 'schedular'; did you mean 'scheduler'?"),
        (
            "worker-ttl: 1s\n",
            1,
            "unknown section 'worker-ttl'; did you mean 'scheduler.worker-ttl'?",
        ),
        (
            "scheduler:\n  slice-tasks: 1\n",
            2,
            "unknown setting 'scheduler.slice-tasks'; did you mean 'materializer.slice-tasks'?",
        ),
        ("zzz: 1\n", 1, "unknown section 'zzz'"),
        (
            "distributed:\n  scheduler: {}\n",
            1,
            "unknown section 'distributed': it belongs in a file of Dask's",
        ),
        (
            "comm:\n  tls:\n    cafile: x\n",
            3,
            "unknown setting 'comm.tls.cafile'; did you mean 'comm.tls.ca-file'?",
        ),
        (
            "\nscheduler:\n  worker-ttl: 5 foos\n",
            3,
            "scheduler.worker-ttl: unknown unit 'foos' in '5 foos'; "
            "use us, ms, s, m, h, d or w, or their full names",
        ),
        (
            "scheduler:\n  allowed-failures: -1\n",
            2,
            "scheduler.allowed-failures: expected a whole number from 0, got -1",
        ),
        (
            "engine:\n  validate: all\n",
            2,
            "engine.validate: expected one of off, turn, event, got 'all'",
        ),
        ("scheduler: 8786\n", 1, "scheduler is a section, got 8786"),
        (
            "scheduler:\n  work-stealing: maybe\n",
            2,
            "scheduler.work-stealing: expected true or false, got 'maybe'",
        ),
        (
            "logging:\n  levels:\n    root: loud\n",
            2,
            "logging.levels: root: expected one of debug, info, warning, error, critical, "
            "got 'loud'",
        ),
        ("scheduler:\n  port: 1\n  port: 2\n", 3, "'port' is given twice, first in line 2"),
        (
            "scheduler:\n  worker-saturation: 0\n",
            2,
            "scheduler.worker-saturation: expected a number above 0, or inf, got 0",
        ),
        (
            "logging:\n  text-format: '%(nope'\n",
            2,
            "logging.text-format: expected a log format like %(levelname)s - %(message)s, got "
            "'%(nope': Invalid format '%(nope' for '%' style",
        ),
        ("- a\n- b\n", 1, "expected sections, got ['a', 'b']"),
    ],
)
def test_a_mistake_stops_with_file_line_and_nearest_name(sandbox, text, line, message):
    path = sandbox.user(text)
    assert sandbox.problem() == f"{path}:{line}: {message}"


@pytest.mark.parametrize(
    ("text", "line"), [("scheduler: [\n", 2), ("a: b: c\n", 1), ("scheduler:\n\t- x\n", 2)]
)
def test_yaml_that_cannot_be_read_stops_with_its_line(sandbox, text, line):
    path = sandbox.user(text)
    assert sandbox.problem().startswith(f"{path}:{line}: not valid YAML: ")


@pytest.mark.parametrize("source", [b"scheduler: \xff\xfe", b"a: \x00"])
def test_bytes_that_are_not_text_stop(sandbox, source):
    path = sandbox.user("")
    Path(path).write_bytes(source)
    assert sandbox.problem().startswith(f"{path}: ")


def test_a_document_that_contains_itself_stops(sandbox):
    path = sandbox.user("scheduler: &a\n  host: *a\n")
    assert "nested too deeply" in sandbox.problem()
    assert path in sandbox.problem()


def test_yaml_tags_build_no_objects(sandbox):
    path = sandbox.user("scheduler:\n  host: !!python/object/apply:os.getcwd []\n")
    assert sandbox.problem().startswith(f"{path}:2: not valid YAML: ")


def test_merge_keys_work(sandbox):
    path = sandbox.write(
        "a.yaml",
        "comm: &limits\n  max-frames: 5\n  socket-backlog: 6\n"
        "materializer: {processes: 2}\nclient: {<<: {heartbeat-interval: 1s}}\n",
    )
    config = sandbox.load([path])
    assert config.client.heartbeat_interval == 1.0


def test_all_mistakes_are_named_at_once(sandbox):
    first = sandbox.system("scheduler:\n  prot: 1\n  worker-ttl: x\n")
    second = sandbox.user("comm: {max-frames: many}\n")
    places = [line.split(": ")[0] for line in sandbox.problems()]
    assert places == [f"{first}:2", f"{first}:3", f"{second}:1"]


def test_a_config_file_that_is_missing_stops(sandbox):
    assert sandbox.problem(["/nonexistent/x.yaml"]) == (
        "/nonexistent/x.yaml: cannot be read: No such file or directory"
    )


def test_a_mistake_stops_even_where_a_later_source_overrides_it(sandbox):
    path = sandbox.user("scheduler: {worker-ttl: x}\n")
    line = sandbox.problem(DISTRIBUTED_CORE__SCHEDULER__WORKER_TTL="1s")
    assert line.startswith(f"{path}:1: ")


def test_limits_that_contradict_each_other_stop(sandbox):
    path = sandbox.user("comm:\n  max-frame-bytes: 2GiB\n  max-message-bytes: 1GiB\n")
    assert sandbox.problem() == (
        f"{path}:2: comm.max-frame-bytes (2GiB) is above comm.max-message-bytes (1GiB, {path}:3)"
    )


def test_a_secret_that_is_badly_quoted_is_not_repeated(sandbox):
    sandbox.user("comm:\n  tls:\n    scheduler-key: [hunter2]\n")
    line = sandbox.problem()
    assert "scheduler-key: expected a path of a PEM file, or PEM text, got list" in line
    assert "hunter2" not in line


# Dask's configuration


def set_at(tree, path, value):
    *parents, name = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = value


DASK_VALUES = {
    "distributed.scheduler.allowed-failures": (7, 7),
    "distributed.scheduler.bandwidth": ("50 MB", 50_000_000),
    "distributed.scheduler.blocked-handlers": (["feed"], ("feed",)),
    "distributed.scheduler.contact-address": ("tcp://s:1", "tcp://s:1"),
    "distributed.scheduler.dashboard.tls.ca-file": ("/x/ca", "/x/ca"),
    "distributed.scheduler.dashboard.tls.cert": (None, None),
    "distributed.scheduler.dashboard.tls.key": ("/x/key", "/x/key"),
    "distributed.scheduler.default-data-size": ("2kiB", 2048),
    "distributed.scheduler.default-task-durations": ({"split-stage": "1s"}, 1.0),
    "distributed.scheduler.events-cleanup-delay": ("2h", 7200.0),
    "distributed.scheduler.http.routes": (["distributed.http.scheduler.api"], True),
    "distributed.scheduler.idle-timeout": ("30 minutes", 1800.0),
    "distributed.scheduler.no-workers-timeout": (60, 60.0),
    "distributed.scheduler.rootish-taskgroup": (6, 6),
    "distributed.scheduler.rootish-taskgroup-dependencies": (7, 7),
    "distributed.scheduler.unknown-task-duration": ("1s", 1.0),
    "distributed.scheduler.validate": (True, "event"),
    "distributed.scheduler.work-stealing": (False, False),
    "distributed.scheduler.work-stealing-interval": (100, 0.1),
    "distributed.scheduler.worker-saturation": ("inf", float("inf")),
    "distributed.scheduler.worker-ttl": ("10 minutes", 600.0),
    "distributed.worker.memory.recent-to-old-time": ("10s", 10.0),
    "distributed.worker.memory.rebalance.measure": ("managed", "managed"),
    "distributed.worker.memory.rebalance.sender-min": (0.4, 0.4),
    "distributed.worker.memory.rebalance.recipient-max": (0.7, 0.7),
    "distributed.worker.memory.rebalance.sender-recipient-gap": (0.2, 0.2),
    "distributed.adaptive.target-duration": ("9s", 9.0),
    "distributed.comm.default-scheme": ("tcp", "tcp"),
    "distributed.comm.require-encryption": (False, False),
    "distributed.comm.socket-backlog": (10, 10),
    "distributed.comm.timeouts.connect": ("5s", 5.0),
    "distributed.comm.timeouts.tcp": ("6s", 6.0),
    "distributed.comm.tls.ca-file": ("/x/ca", "/x/ca"),
    "distributed.comm.tls.ciphers": ("HIGH", "HIGH"),
    "distributed.comm.tls.max-version": (1.3, "1.3"),
    "distributed.comm.tls.min-version": (1.3, "1.3"),
    "distributed.comm.tls.scheduler.cert": ("/x/cert", "/x/cert"),
    "distributed.comm.tls.scheduler.key": ("/x/key", "/x/key"),
    "distributed.dashboard.prometheus.namespace": ("acme", "acme"),
    "distributed.admin.log-format": ("%(message)s", "%(message)s"),
    "distributed.admin.log-length": (50, 50),
    "distributed.admin.low-level-log-length": (60, 60),
    "distributed.admin.tick.interval": ("10ms", 0.01),
    "distributed.admin.tick.limit": (500, 0.5),
}


def value_of(config, setting):
    for part in setting.split("."):
        config = getattr(config, part.replace("-", "_"))
    return config["split-stage"] if isinstance(config, dict) else config


@pytest.mark.parametrize("key", dask_keys.MAPPED)
def test_a_key_of_dask_sets_ours(sandbox, key):
    raw, expected = DASK_VALUES[key]
    setting = dask_keys.MAPPED[key].setting
    tree = {}
    set_at(tree, key, raw)

    path = sandbox.dask(yaml.safe_dump(tree))
    config = sandbox.load()
    assert value_of(config, setting) == expected
    origin = config.origins[setting if not isinstance(raw, dict) else f"{setting}.split-stage"]
    assert origin.kind == "dask"
    assert origin.text.startswith(path + ":")

    os.unlink(path)
    assert value_of(sandbox.load(DASK_INTERNAL_INHERIT_CONFIG=inherited(tree)), setting) == expected
    variable = "DASK_" + key.upper().replace(".", "__").replace("-", "_")
    assert value_of(sandbox.load(**{variable: str(raw)}), setting) == expected


def test_every_key_of_dask_maps_to_a_setting():
    assert {row.setting for row in dask_keys.MAPPED.values()} <= set(SETTINGS)
    assert not set(dask_keys.MAPPED) & dask_keys.IGNORED
    known = {*dask_keys.MAPPED, *dask_keys.IGNORED}
    assert {new for new in dask_keys.RENAMED.values()} <= known


def test_every_key_of_stock_dask_is_in_the_table():
    spec = importlib.util.find_spec("distributed")
    path = Path(spec.submodule_search_locations[0], "distributed.yaml")
    trees = (*dask_keys.IGNORED_TREES, "distributed.scheduler.default-task-durations")
    for key, _ in flatten(yaml.safe_load(path.read_text())):
        known = key in dask_keys.MAPPED or key in dask_keys.IGNORED or key in dask_keys.REFUSED
        assert known or key.startswith(trees), key


def test_dask_writes_underscores_as_dashes(sandbox):
    sandbox.dask(
        "distributed:\n  scheduler:\n    worker_ttl: 1s\n    default_task_durations: {a_b: 1s}\n"
    )
    config = sandbox.load()
    assert config.scheduler.worker_ttl == 1.0
    assert config.scheduler.default_task_durations["a_b"] == 1.0


def test_dask_environment_is_read_as_dask_reads_it(sandbox):
    config = sandbox.load(
        DASK_DISTRIBUTED__SCHEDULER="{'worker-ttl': '1s', 'allowed_failures': 9}",
        DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION="False",
        DASK_DISTRIBUTED__SCHEDULER__IDLE_TIMEOUT="null",
        DASK_SCHEDULER_ADDRESS="tcp://1.2.3.4:5",
        DASK_CONFIG="/nonexistent",
        DASK_DATAFRAME__SHUFFLE__METHOD="tasks",
    )
    assert config.scheduler.worker_ttl == 1.0
    assert config.scheduler.allowed_failures == 9
    assert config.comm.require_encryption is False
    assert config.warnings == ()


def test_dask_search_path(sandbox, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    expected = [
        sandbox.write("root/x.yml", ""),
        sandbox.write("prefix/etc/dask/x.json", "{}"),
        sandbox.write("home/.config/dask/a.yaml", ""),
        sandbox.write("home/.config/dask/b.YAML", ""),
        sandbox.write("own.yaml", ""),
    ]
    environ = {**sandbox.environ, "DASK_ROOT_CONFIG": str(tmp_path / "root")}
    found = dask_files({**environ, "DASK_CONFIG": expected[-1]})
    assert [path for path in found if path.startswith(str(tmp_path))] == expected
    # Named twice: read once, where it is named last.
    twice = dask_files({**environ, "DASK_CONFIG": str(tmp_path / "root")})
    assert [path for path in twice if path.startswith(str(tmp_path / "root"))] == [expected[0]]
    assert twice[-1] == expected[0]


def test_an_unknown_key_of_dask_is_a_warning_and_counted(sandbox):
    path = sandbox.dask(
        "distributed:\n  scheduler:\n    worker-tll: 1s\n  wrker:\n    a: 1\n    b: 2\n"
        "other:\n  x: 1\n"
    )
    config = sandbox.load(DASK_DISTRIBUTED__COMM__NOPE="1")
    assert config.unknown_dask_keys == (
        "distributed.scheduler.worker-tll",
        "distributed.wrker",
        "distributed.comm.nope",
    )
    assert config.warnings[0] == (
        f"{path}:3: unknown Dask setting distributed.scheduler.worker-tll; "
        "did you mean 'distributed.scheduler.worker-ttl'?; ignored"
    )
    assert len(config.warnings) == 3


def test_keys_that_dask_knows_and_we_do_not_use_are_silent(sandbox):
    sandbox.dask(
        "distributed:\n  nanny:\n    environ: {A: 1}\n  logging:\n    distributed: debug\n"
        "  comm: {compression: lz4}\n  version: 2\n"
        "  scheduler:\n    active-memory-manager: {start: false, policies: [{class: x}]}\n"
        "jobqueue:\n  slurm: {cores: 1}\n"
    )
    config = sandbox.load()
    assert config.warnings == ()
    assert config.unknown_dask_keys == ()


def test_old_names_of_dask_work_with_a_warning(sandbox):
    path = sandbox.dask("worker-ttl: 7s\ndistributed:\n  p2p: {disk: true}\n")
    config = sandbox.load(DASK_DISTRIBUTED__SCHEDULER__TRANSITION_LOG_LENGTH="5")
    assert config.scheduler.worker_ttl == 7.0
    assert config.scheduler.events_max_length == 5
    assert config.warnings[0] == (
        f"{path}:1: the Dask setting worker-ttl is now called distributed.scheduler.worker-ttl"
    )
    assert len(config.warnings) == 3
    assert config.unknown_dask_keys == ()


def test_a_bad_value_of_dask_stops_with_dasks_name(sandbox):
    path = sandbox.dask("distributed:\n  scheduler:\n    worker-ttl: soon\n")
    line = sandbox.problem()
    assert line.startswith(f"{path}:3: distributed.scheduler.worker-ttl: unknown unit 'soon'")
    os.unlink(path)
    line = sandbox.problem(DASK_DISTRIBUTED__ADMIN__TICK__LIMIT="soon")
    assert line.startswith("DASK_DISTRIBUTED__ADMIN__TICK__LIMIT: distributed.admin.tick.limit: ")


def test_a_malformed_file_of_dask_stops(sandbox):
    path = sandbox.dask("distributed: [}\n")
    assert sandbox.problem().startswith(f"{path}:1: not valid YAML")


@pytest.mark.parametrize("value", ["!!", "bm90IGpzb24=", inherited([1])])
def test_a_malformed_inheritance_stops(sandbox, value):
    assert sandbox.problem(DASK_INTERNAL_INHERIT_CONFIG=value).startswith(
        "DASK_INTERNAL_INHERIT_CONFIG: "
    )


def test_what_dask_itself_hands_down_is_understood(sandbox):
    """In a process of its own: the configuration of this one must not change."""
    code = (
        "import dask, distributed\n"
        "dask.config.set({'distributed.scheduler.worker-ttl': '42s'})\n"
        "print(dask.config.serialize(dask.config.global_config))"
    )
    environ = {**os.environ, "HOME": str(sandbox.root), "DASK_ROOT_CONFIG": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, timeout=60, check=True
    )
    config = sandbox.load(DASK_INTERNAL_INHERIT_CONFIG=done.stdout.decode().strip())
    assert config.scheduler.worker_ttl == 42.0
    assert config.warnings == ()


def test_preloads_of_dask_are_refused(sandbox):
    path = sandbox.dask("distributed:\n  scheduler:\n    preload: [my.module]\n")
    line = sandbox.problem()
    assert line.startswith(f"{path}:3: distributed.scheduler.preload: modules cannot be loaded")
    os.unlink(path)
    sandbox.dask("distributed:\n  scheduler:\n    preload: []\n    preload-argv: []\n")
    sandbox.load()


def test_limits_that_dask_leaves_open_stay_ours(sandbox):
    sandbox.dask("distributed:\n  admin: {log-length: null, low-level-log-length: null}\n")
    config = sandbox.load()
    assert config.logging.ring_length == 10_000
    assert config.scheduler.events_max_length == 1000


# The result for people


def test_the_report_names_origins_and_can_be_loaded_again(sandbox):
    path = sandbox.user(
        "scheduler:\n  worker-ttl: 90s\n  host: 'tcp://[::1]:0'\n"
        "  default-task-durations: {'odd name: #1': 1.5s}\n"
        "logging:\n  levels: {a.b: debug}\n"
        "http: {address: '127.0.0.1:0,[::1]:1', prefix: /x/y/}\n"
        "security: {blocked-handlers: ['no', feed]}\n"
        "engine: {validate: event}\n"
    )
    config = sandbox.load(DASK_DISTRIBUTED__SCHEDULER__BANDWIDTH="1 GB", DASK_DISTRIBUTED__X="1")
    text = render(config)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"worker-ttl: 90s # {path}:2" in lines
    assert "bandwidth: 1GB/s # DASK_DISTRIBUTED__SCHEDULER__BANDWIDTH" in lines
    assert "worker-saturation: 1.1 # default" in lines
    assert "# listens on tcp://[::1]:0" in lines
    assert "# unknown Dask settings: distributed.x" in lines
    other = Sandbox(sandbox.root / "other")
    again = other.load([other.write("again.yaml", text)])
    for section in SECTIONS:
        if "." not in section:
            assert getattr(again, section) == getattr(config, section)


def test_the_report_shows_no_pem_text(sandbox):
    pem = "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----\n"
    config = sandbox.load(DASK_DISTRIBUTED__COMM__TLS__SCHEDULER__KEY=pem)
    assert config.comm.tls.scheduler_key == pem
    text = render(config)
    assert "hunter2" not in text
    assert f'scheduler-key: "(PEM text, {len(pem)} characters)"' in text


def test_kinds_read_back_what_they_show(sandbox):
    config = sandbox.load()
    for setting, kind in SETTINGS.items():
        value = config
        for part in setting.split("."):
            value = getattr(value, part.replace("-", "_"))
        assert kind.parse(yaml.safe_load(kind.show(value))) == value
        assert kind.description
        assert isinstance(kind, MappingOf) == isinstance(value, dict)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.from_regex(r"[0-9.]{1,5}e[0-9]{1,4} ?[a-zA-Z]{0,3}", fullmatch=True)
    | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


KINDS = {kind.description: kind for kind in SETTINGS.values()}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@hypothesis.settings(max_examples=15, deadline=None)
@given(raw=ANYTHING)
def test_any_value_is_either_taken_or_refused(kind, raw):
    try:
        value = kind.parse(raw)
    except ValueError:
        return
    assert kind.parse(yaml.safe_load(kind.show(value))) == value

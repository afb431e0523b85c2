"""Every source of settings, merged into one frozen ``Config``.

Owns the order of sources and the messages about what is wrong in them. Keeps nothing: two calls
read everything twice. Never logs: what an operator should know is in ``Config.notes`` and
``Config.warnings``. Called once by the command line, at start-up.

Sources, later wins:

1. the defaults we ship;
2. Dask's YAML files, in Dask's search path;
3. ``DASK_INTERNAL_INHERIT_CONFIG``: a spawner's whole configuration, mostly defaults and files of
   its own, so it ranks with files and not with variables that somebody set on purpose;
4. ``/etc/distributed-core/*.yaml``, then those in the user's directory;
5. ``DASK_...`` variables;
6. ``DISTRIBUTED_CORE__...`` variables;
7. ``--config`` files, in the order given;
8. other flags.

Of Dask's sources only what ``dask_keys`` lists is read.
"""

import ast
import base64
import binascii
import json
import os
import site
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from distributed_core.config import dask_keys, documents, listen
from distributed_core.config.documents import Located
from distributed_core.config.flags import FLAGS
from distributed_core.config.kinds import MappingOf
from distributed_core.config.schema import (
    SECTIONS,
    SETTINGS,
    Config,
    ConfigError,
    Origin,
    build_section,
)

__all__ = [
    "ENVIRONMENT_PREFIX",
    "SYSTEM_DIRECTORY",
    "dask_files",
    "defaults_path",
    "environment_name",
    "load",
    "own_files",
]

ENVIRONMENT_PREFIX = "DISTRIBUTED_CORE__"
SYSTEM_DIRECTORY = "/etc/distributed-core"
_INHERIT = "DASK_INTERNAL_INHERIT_CONFIG"
_DASK_ENDINGS = (".json", ".yaml", ".yml")
_OWN_ENDINGS = (".yaml", ".yml")


def load(
    config_files: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    system_directory: str = SYSTEM_DIRECTORY,
    interface_address: Callable[[str], str] = listen.interface_address,
) -> Config:
    """Return the configuration of this process.

    ``config_files`` are those of ``--config``; ``flags`` maps a flag of ``flags.FLAGS`` to what
    the user gave; ``environ`` is the process's own if None.

    Raises ConfigError, one line for each problem, each naming its file and line, variable or flag.
    """
    environ = os.environ if environ is None else environ
    merger = _Merger()
    merger.own_file(defaults_path(), kind="default")
    for path in dask_files(environ):
        merger.dask_file(path)
    merger.dask_inherited(environ)
    for path in own_files(environ, system_directory):
        merger.own_file(path)
    merger.dask_environment(environ)
    merger.own_environment(environ)
    for path in config_files:
        merger.own_file(path)
    for flag, raw in (flags or {}).items():
        merger.put(FLAGS[flag], Located(raw, None), Origin("flag", flag))
    return merger.finish(interface_address)


def defaults_path() -> str:
    """Return the path of the defaults, in an installed package as in a source tree."""
    here = os.path.dirname(os.path.abspath(__file__))
    installed = os.path.join(here, "defaults", "defaults.yaml")
    if os.path.exists(installed):
        return installed
    return os.path.join(os.path.dirname(os.path.dirname(here)), "config", "defaults.yaml")


def own_files(environ: Mapping[str, str], system_directory: str = SYSTEM_DIRECTORY) -> list[str]:
    """Return our files in the order they are read: the system's, then the user's."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(_home(environ), ".config")
    directories = (system_directory, os.path.join(base, "distributed-core"))
    return [path for directory in directories for path in _files_in(directory, _OWN_ENDINGS)]


def dask_files(environ: Mapping[str, str]) -> list[str]:
    """Return Dask's files in the order that Dask reads them."""
    places = [
        environ.get("DASK_ROOT_CONFIG", "/etc/dask"),
        *(os.path.join(prefix, "etc", "dask") for prefix in (sys.prefix, *site.PREFIXES)),
        os.path.join(_home(environ), ".config", "dask"),
    ]
    if "DASK_CONFIG" in environ:
        places.append(environ["DASK_CONFIG"])
    # A place that is named twice counts where it is named last.
    unique = reversed(dict.fromkeys(reversed(places)))
    return [path for place in unique for path in _files_in(place, _DASK_ENDINGS)]


def environment_name(setting: str) -> str:
    """Return the variable that sets ``setting``."""
    return ENVIRONMENT_PREFIX + setting.upper().replace(".", "__").replace("-", "_")


def _home(environ: Mapping[str, str]) -> str:
    return environ.get("HOME") or os.path.expanduser("~")


def _files_in(place: str, endings: tuple[str, ...]) -> list[str]:
    """Return the files with these endings in a directory; a file stands for itself."""
    if os.path.isdir(place):
        try:
            names = sorted(os.listdir(place))
        except OSError as exc:
            raise ConfigError(f"{place}: cannot read the directory: {exc.strerror}") from None
        return [os.path.join(place, name) for name in names if name.lower().endswith(endings)]
    return [place] if os.path.isfile(place) else []


class _Merger:
    """Collects values in order of precedence, and every problem on the way."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        self._origins: dict[str, Origin] = {}
        self._problems: list[str] = []
        self._warnings: list[str] = []
        self._unknown_dask_keys: dict[str, None] = {}

    def put(self, setting: str, raw: Located, origin: Origin, shown: str | None = None) -> None:
        """Take a value of a known setting; ``shown`` is its name in the source, if it differs."""
        kind = SETTINGS[setting]
        origin = origin._replace(line=raw.line)
        try:
            if isinstance(kind, MappingOf):
                self._put_entries(setting, kind, raw, origin)
            else:
                self._values[setting] = kind.parse(_plain(raw))
                self._origins[setting] = origin
        except ValueError as exc:
            self._problems.append(f"{origin.text}: {shown or setting}: {exc}")

    def _put_entries(self, setting: str, kind: MappingOf, raw: Located, origin: Origin) -> None:
        value = raw.value
        if isinstance(value, str):
            parsed = documents.parse_document(value.encode(), origin.text)
            value = parsed.value if parsed is not None else None
        if not isinstance(value, dict | None):
            raise ValueError(f"expected {kind.description}, got {value!r}")
        entries: dict[str, object] = dict(self._mapping(setting))
        self._origins[setting] = origin
        for name, entry in (value or {}).items():
            entries.update(kind.parse({name: _plain(entry)}))
            self._origins[f"{setting}.{name}"] = origin._replace(line=entry.line)
        self._values[setting] = entries

    def _mapping(self, setting: str) -> Mapping[str, object]:
        known = self._values.get(setting, {})
        assert isinstance(known, Mapping)
        return known

    def own_file(self, path: str, kind: str = "file") -> None:
        """Take a file of ours: every name in it must be known."""
        document = self._read(path)
        if document is None:
            return
        if not isinstance(document.value, dict):
            self._problems.append(f"{path}:{document.line}: expected sections, got {document[0]!r}")
            return
        self._own_section(document.value, "", path, kind)

    def _own_section(
        self, entries: Mapping[str, Located], prefix: str, path: str, kind: str
    ) -> None:
        for name, item in entries.items():
            setting = prefix + name
            where = f"{path}:{item.line}"
            if setting in SETTINGS:
                self.put(setting, item, Origin(kind, path))
            elif setting not in SECTIONS:
                self._problems.append(f"{where}: {_unknown(setting)}")
            elif isinstance(item.value, dict):
                self._own_section(item.value, setting + ".", path, kind)
            elif item.value is not None:
                self._problems.append(f"{where}: {setting} is a section, got {item.value!r}")

    def own_environment(self, environ: Mapping[str, str]) -> None:
        """Take our variables: every one must be known."""
        for variable, raw in sorted(environ.items()):
            if not variable.startswith(ENVIRONMENT_PREFIX):
                continue
            setting = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            setting = setting.replace("__", ".").replace("_", "-")
            if setting in SETTINGS:
                self.put(setting, Located(raw, None), Origin("environment", variable))
            else:
                self._problems.append(f"{variable}: {_unknown(setting, environment_name)}")

    def dask_file(self, path: str) -> None:
        """Take what concerns us in a file of Dask's."""
        if not os.access(path, os.R_OK):
            # Dask passes over files that it may not read.
            self._warnings.append(f"{path}: may not be read, so it is ignored")
            return
        document = self._read(path)
        if document is None:
            return
        if not isinstance(document.value, dict):
            self._problems.append(f"{path}:{document.line}: expected sections, got {document[0]!r}")
            return
        self._dask_roots(document.value, Origin("dask", path))

    def dask_inherited(self, environ: Mapping[str, str]) -> None:
        """Take what concerns us in the configuration that a spawner hands down."""
        encoded = environ.get(_INHERIT)
        if encoded is None:
            return
        try:
            roots = json.loads(base64.urlsafe_b64decode(encoded))
        except (binascii.Error, ValueError, RecursionError) as exc:
            self._problems.append(f"{_INHERIT}: not base64 of JSON: {exc}")
            return
        if not isinstance(roots, dict):
            self._problems.append(f"{_INHERIT}: expected a mapping, got {type(roots).__name__}")
            return
        self._dask_paths(roots, Origin("dask", _INHERIT))

    def dask_environment(self, environ: Mapping[str, str]) -> None:
        """Take what concerns us in variables of Dask's."""
        for variable, raw in sorted(environ.items()):
            if not variable.startswith("DASK_") or variable == _INHERIT:
                continue
            path = variable.removeprefix("DASK_").lower().replace("__", ".")
            self._dask_paths({path: _python_value(raw)}, Origin("dask", variable))

    def _dask_paths(self, values: Mapping[str, object], origin: Origin) -> None:
        """Take plain values whose names may be dotted."""
        for path, value in values.items():
            *parents, name = str(path).split(".")
            nested: Located = Located({name: documents.located(value)}, None)
            for parent in reversed(parents):
                nested = Located({parent: nested}, None)
            assert isinstance(nested.value, dict)
            self._dask_roots(nested.value, origin)

    def _dask_roots(self, roots: Mapping[str, Located], origin: Origin) -> None:
        for root, item in roots.items():
            if root == "distributed" and isinstance(item.value, dict):
                self._dask_tree(item.value, "distributed.", origin)
            elif (old := root.replace("_", "-")) in dask_keys.RENAMED:
                self._dask_renamed(old, item, origin)

    def _dask_tree(self, entries: Mapping[str, Located], prefix: str, origin: Origin) -> None:
        for name, item in entries.items():
            key = prefix + name.replace("_", "-")
            if key in dask_keys.MAPPED or key in dask_keys.REFUSED:
                self._dask_value(key, item, origin)
            elif key in dask_keys.RENAMED:
                self._dask_renamed(key, item, origin)
            elif key in dask_keys.IGNORED or key in dask_keys.IGNORED_TREES:
                continue
            elif key in _DASK_PARENTS and isinstance(item.value, dict):
                self._dask_tree(item.value, key + ".", origin)
            elif key in _DASK_PARENTS and item.value is None:
                continue
            else:
                self._unknown_dask_keys[key] = None
                hint = _nearest(key, _DASK_NAMES)
                where = origin._replace(line=item.line).text
                self._warnings.append(f"{where}: unknown Dask setting {key}{hint}; ignored")

    def _dask_renamed(self, old: str, item: Located, origin: Origin) -> None:
        key = dask_keys.RENAMED[old]
        where = origin._replace(line=item.line).text
        self._warnings.append(f"{where}: the Dask setting {old} is now called {key}")
        if key in dask_keys.MAPPED:
            self._dask_value(key, item, origin)

    def _dask_value(self, key: str, item: Located, origin: Origin) -> None:
        where = origin._replace(line=item.line).text
        if key in dask_keys.REFUSED:
            if _plain(item) not in (None, "", [], (), {}):
                self._problems.append(f"{where}: {key}: {dask_keys.REFUSED[key]}")
            return
        setting, convert = dask_keys.MAPPED[key]
        try:
            converted = item if convert is None else Located(convert(_plain(item)), item.line)
        except dask_keys.Skip:
            return
        except ValueError as exc:
            self._problems.append(f"{where}: {key}: {exc}")
            return
        self.put(setting, converted, origin, shown=key)

    def _read(self, path: str) -> Located | None:
        try:
            return documents.read_document(path)
        except OSError as exc:
            self._problems.append(f"{path}: cannot be read: {exc.strerror}")
        except ConfigError as exc:
            self._problems.append(str(exc))
        return None

    def finish(self, interface_address: Callable[[str], str]) -> Config:
        """Return the result. Raises ConfigError with all problems, if there is any."""
        self._check()
        if self._problems:
            raise ConfigError("\n".join(self._problems))
        try:
            plan = listen.plan(self._values, self._origins, interface_address)
        except ValueError as exc:
            raise ConfigError(str(exc)) from None
        derived = {
            "scheduler.listen": plan.listen,
            "scheduler.open-plain": plan.open_plain,
            "comm.encryption-required": plan.encryption_required,
            "http.listen": plan.http_listen,
        }
        sections = {
            name: build_section(section, name, self._values, derived)
            for name, section in SECTIONS.items()
            if "." not in name
        }
        return Config(
            **sections,
            origins=self._origins,
            notes=plan.notes,
            warnings=(*self._warnings, *plan.warnings),
            unknown_dask_keys=tuple(self._unknown_dask_keys),
        )

    def _check(self) -> None:
        """Values that are right alone and wrong together."""
        for small, large in (
            ("comm.max-handshake-bytes", "comm.max-message-bytes"),
            ("comm.max-frame-bytes", "comm.max-message-bytes"),
            ("comm.tls.min-version", "comm.tls.max-version"),
        ):
            low, high = self._values.get(small), self._values.get(large)
            if low is not None and high is not None and low > high:  # type: ignore[operator]
                self._problems.append(
                    f"{self._origins[small].text}: {small} ({SETTINGS[small].show(low)}) is above "
                    f"{large} ({SETTINGS[large].show(high)}, {self._origins[large].text})"
                )


def _plain(item: object) -> object:
    """Return ``item`` without line numbers."""
    value = item.value if isinstance(item, Located) else item
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return value


def _python_value(raw: str) -> object:
    """Return what Dask makes of a variable: a Python literal, a YAML word, or the text itself."""
    try:
        value: object = ast.literal_eval(raw)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        words = {"none": None, "null": None, "false": False, "true": True}
        return words.get(raw.lower(), raw)
    return value


def _unknown(setting: str, spell: Callable[[str], str] = str) -> str:
    root, _, rest = setting.partition(".")
    if root == "distributed":
        mapped = dask_keys.MAPPED.get(setting)
        where = f"; here it is called {mapped.setting}" if mapped else ""
        return f"unknown section 'distributed': it belongs in a file of Dask's{where}"
    what = "setting" if rest else "section"
    return f"unknown {what} {setting!r}{_nearest(setting, (*SETTINGS, *SECTIONS), spell)}"


def _nearest(name: str, candidates: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """Return a hint at the name that was probably meant, or nothing."""
    import difflib

    names = list(candidates)
    wanted = name.replace("_", "-")
    leaf = wanted.rpartition(".")[2]
    found = [one for one in names if one == wanted]
    found = found or [one for one in names if one.rpartition(".")[2] == leaf]
    found = found or difflib.get_close_matches(wanted, names, 1, 0.7)
    if not found:
        by_leaf = {one.rpartition(".")[2]: one for one in reversed(names)}
        found = [by_leaf[near] for near in difflib.get_close_matches(leaf, by_leaf, 1, 0.7)]
    return f"; did you mean {spell(found[0])!r}?" if found else ""


_DASK_NAMES = (*dask_keys.MAPPED, *dask_keys.REFUSED, *dask_keys.IGNORED, *dask_keys.IGNORED_TREES)
_DASK_PARENTS = frozenset(
    key[:index] for key in _DASK_NAMES for index, letter in enumerate(key) if letter == "."
)

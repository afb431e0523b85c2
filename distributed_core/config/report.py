"""The configuration for people: what ``check-config`` prints.

Owns that text. Never shows PEM text. Called by the command line.
"""

from collections.abc import Iterator

from distributed_core.config.kinds import MappingOf
from distributed_core.config.schema import SETTINGS, Config

__all__ = ["render"]

_ORIGIN_COLUMN = 52


def render(config: Config) -> str:
    """Return ``config`` as YAML that can be loaded again, each value with its origin, and what
    follows from it as comments."""
    return "\n".join([*_settings(config), "", *_consequences(config)]) + "\n"


def _settings(config: Config) -> Iterator[str]:
    sections: set[str] = set()
    for setting, kind in SETTINGS.items():
        parent, _, name = setting.rpartition(".")
        indent = "  " * setting.count(".")
        if parent not in sections:
            sections.add(parent)
            yield "  " * parent.count(".") + parent.rpartition(".")[2] + ":"
        value = _value(config, setting)
        if isinstance(kind, MappingOf) and value:
            yield f"{indent}{name}:"
            yield from _entries(config, setting, kind, value, indent + "  ")
        else:
            yield _line(f"{indent}{name}: {kind.show(value)}", config, setting)


def _entries(
    config: Config, setting: str, kind: MappingOf, value: object, indent: str
) -> Iterator[str]:
    assert isinstance(value, dict)
    for name, item in value.items():
        shown = kind.show({name: item}).strip("{}")
        yield _line(indent + shown, config, f"{setting}.{name}")


def _line(text: str, config: Config, key: str) -> str:
    return f"{text:<{_ORIGIN_COLUMN}}  # {config.origins[key].text}"


def _value(config: Config, setting: str) -> object:
    value: object = config
    for part in setting.split("."):
        value = getattr(value, part.replace("-", "_"))
    return value


def _consequences(config: Config) -> Iterator[str]:
    for endpoint in config.scheduler.listen:
        yield f"# listens on {endpoint}"
    for endpoint in config.http.listen:
        yield f"# serves HTTP on {endpoint}"
    if not config.http.listen:
        yield "# serves no HTTP"
    for note in config.notes:
        yield f"# note: {note}"
    for warning in config.warnings:
        yield f"# warning: {warning}"
    if config.unknown_dask_keys:
        yield "# unknown Dask settings: " + ", ".join(config.unknown_dask_keys)

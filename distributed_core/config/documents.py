"""YAML with line numbers.

Owns the reading of one file into nested ``Located`` values. Knows no setting. Called by
``loader`` and ``reference``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import yaml

from distributed_core.config.schema import ConfigError

__all__ = ["Located", "located", "parse_document", "read_document"]

# libyaml, where PyYAML was built with it, is ten times faster.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_DEPTH = 30


class Located(NamedTuple):
    """A value and the line it starts on (from 1; None: it has no file).

    A mapping is held as ``dict[str, Located]``, everything else as plain Python. A name that is not
    text in YAML keeps its spelling, so that ``on`` stays a name.
    """

    value: object
    line: int | None


def read_document(path: str) -> Located | None:
    """Return what the file holds, None if it is empty.

    Raises ConfigError, naming file and line, for malformed YAML and for a name that is given twice,
    and OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        return parse_document(file.read(), path)


def parse_document(source: bytes, path: str) -> Located | None:
    """The same for text that was read from ``path``."""
    try:
        loader = _Loader(source)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: {_flat(exc)}") from None
    try:
        node = loader.get_single_node()
        return None if node is None else _convert(loader, node, path, 0)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = path if mark is None else f"{path}:{mark.line + 1}"
        raise ConfigError(f"{where}: not valid YAML: {exc.problem or exc.context}") from None
    except (yaml.YAMLError, ValueError) as exc:
        raise ConfigError(f"{path}: not valid YAML: {_flat(exc)}") from None
    finally:
        loader.dispose()


def located(value: object) -> Located:
    """Return plain nested Python as ``Located`` without lines; names become text."""
    if isinstance(value, dict):
        return Located({str(name): located(item) for name, item in value.items()}, None)
    return Located(value, None)


def _flat(exc: Exception) -> str:
    return " ".join(str(exc).split())


def _convert(loader: yaml.SafeLoader, node: yaml.Node, path: str, depth: int) -> Located:
    line = node.start_mark.line + 1
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{path}:{line}: nested too deeply")
    if not isinstance(node, yaml.MappingNode):
        return Located(loader.construct_object(node, deep=True), line)
    entries: dict[str, Located] = {}
    lines: dict[str, int] = {}
    for name, name_line, value_node in _entries(loader, node, path):
        if name in lines:
            raise ConfigError(
                f"{path}:{name_line}: {name!r} is given twice, first in line {lines[name]}"
            )
        lines[name] = name_line
        value = _convert(loader, value_node, path, depth + 1)
        # The line of the name: that of a value on a line of its own would mislead.
        entries[name] = Located(value.value, name_line)
    return Located(entries, line)


def _entries(
    loader: yaml.SafeLoader, node: yaml.MappingNode, path: str
) -> Iterator[tuple[str, int, yaml.Node]]:
    if any(name.tag == "tag:yaml.org,2002:merge" for name, _ in node.value):
        loader.flatten_mapping(node)
        # Merged entries come first and may be overridden, which is not a name given twice.
        node.value = list({name.value: (name, value) for name, value in node.value}.values())
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise ConfigError(f"{path}:{name.start_mark.line + 1}: a name must be text")
        yield name.value, name.start_mark.line + 1, value

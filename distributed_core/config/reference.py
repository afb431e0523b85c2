"""The reference page of all settings, made from ``defaults.yaml`` and the tables.

Owns ``docs/configuration.md``: ``python -m distributed_core.config.reference`` writes it from the
root of a source tree, ``--check`` only says whether it is current. Not used by the daemon.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from distributed_core.config import dask_keys
from distributed_core.config.documents import Located, parse_document
from distributed_core.config.flags import FLAGS
from distributed_core.config.kinds import MappingOf
from distributed_core.config.loader import defaults_path, environment_name
from distributed_core.config.schema import SETTINGS

__all__ = ["main", "render"]

_INTRODUCTION = """\
# Configuration

<!-- Made by `python -m distributed_core.config.reference`; change config/defaults.yaml instead. -->

Settings are YAML. A file holds only what differs from the defaults. Sources, later wins:

1. the defaults below;
2. Dask's own YAML files, in Dask's search path: `$DASK_ROOT_CONFIG` or `/etc/dask`, `etc/dask` of
   the Python environment, `~/.config/dask`, `$DASK_CONFIG`;
3. `DASK_INTERNAL_INHERIT_CONFIG`, the configuration that a spawner hands down: mostly defaults and
   files of the spawner, so it ranks with files;
4. `/etc/distributed-core/*.yaml`, then `$XDG_CONFIG_HOME/distributed-core/*.yaml`
   (`~/.config/distributed-core`), each in the order of their names;
5. `DASK_…` variables;
6. `DISTRIBUTED_CORE__…` variables: `DISTRIBUTED_CORE__SCHEDULER__WORKER_TTL` is
   `scheduler.worker-ttl`;
7. `--config FILE`, repeatable, in the order given;
8. other flags.

Mappings are merged name by name; everything else is replaced. An unknown name, a bad unit or an
impossible value in our own sources stops start-up with the file, the line and the nearest valid
name. Of Dask's sources the [keys below](#keys-of-dask) are understood; an unknown `distributed.*`
key is a warning and a metric, and all other sections are left alone.

`distributed-core check-config` takes the flags of `distributed-core scheduler` and prints the
result, each value with its origin. It exits with status 1, and says what is wrong, if the
configuration cannot be used.

Durations are written `500ms`, `1s`, `5 minutes`, `1h`, sizes `64KiB` (1024) or `100 MB` (1000),
rates `100 MB/s`. A bare number counts seconds or bytes.
"""


def render(source: bytes) -> str:
    """Return the page for the text of ``defaults.yaml``.

    Raises KeyError for a setting that the text lacks, and ValueError for one without a comment.
    """
    document = parse_document(source, "defaults.yaml")
    assert document is not None
    lines = source.decode().splitlines()
    blocks = [_INTRODUCTION, *_sections(document, lines), *_dask()]
    return "\n".join(blocks)


def _sections(document: Located, lines: list[str]) -> Iterator[str]:
    flags = {setting: flag for flag, setting in FLAGS.items()}
    dask: dict[str, list[str]] = {}
    for key, mapped in dask_keys.MAPPED.items():
        dask.setdefault(mapped.setting, []).append(key)
    parent = None
    for setting, kind in SETTINGS.items():
        section = setting.rpartition(".")[0]
        if section != parent:
            parent = section
            yield f"## {section}\n\n{_comment(_find(document, section), lines)}\n"
        item = _find(document, setting)
        facts = [f"Default: {_default(setting, item)}", f"Value: {kind.description}"]
        if setting in flags:
            flag = flags[setting]
            facts.append(f"Flag: `{flag}`" + (", `--no-dashboard`" * (flag == "--dashboard")))
        facts.append(f"Variable: `{environment_name(setting)}`")
        facts.extend(f"Dask: `{key}`" for key in dask.get(setting, ()))
        listed = "\n".join(f"- {fact}" for fact in facts)
        yield f"### `{setting}`\n\n{_comment(item, lines)}\n\n{listed}\n"


def _find(document: Located, path: str) -> Located:
    item = document
    for part in path.split("."):
        assert isinstance(item.value, Mapping)
        item = item.value[part]
    return item


def _comment(item: Located, lines: list[str]) -> str:
    """Return the comment that stands right above a line, as one paragraph."""
    assert item.line is not None
    words: list[str] = []
    for line in reversed(lines[: item.line - 1]):
        if not line.lstrip().startswith("#"):
            break
        words.insert(0, line.strip().removeprefix("#").strip())
    if not words:
        raise ValueError(f"line {item.line} has no comment")
    return " ".join(words)


def _default(setting: str, item: Located) -> str:
    kind = SETTINGS[setting]
    value = item.value
    if isinstance(kind, MappingOf):
        assert isinstance(value, Mapping)
        value = {name: entry.value for name, entry in value.items()}
    return f"`{kind.show(kind.parse(value))}`"


def _dask() -> Iterator[str]:
    yield (
        "## Keys of Dask\n\n"
        "| Key | Setting |\n| --- | --- |\n"
        + "\n".join(f"| `{key}` | `{row.setting}` |" for key, row in dask_keys.MAPPED.items())
        + "\n"
    )
    yield (
        "Bare numbers of `work-stealing-interval`, `tick.interval` and `tick.limit` count "
        "milliseconds, as in Dask. `http.routes` says only whether "
        "`distributed.http.scheduler.api` is in it.\n"
    )
    yield "Refused unless empty:\n\n" + "".join(
        f"- `{key}`: {reason}\n" for key, reason in dask_keys.REFUSED.items()
    )
    yield "Known and without effect here:\n\n" + "".join(
        f"- `{key}`\n"
        for key in sorted({*dask_keys.IGNORED, *(f"{tree}.*" for tree in dask_keys.IGNORED_TREES)})
    )
    yield "Old names, which Dask still reads, with a warning:\n\n" + "".join(
        f"- `{old}`: `{new}`\n" for old, new in dask_keys.RENAMED.items()
    )


def main(argv: list[str] | None = None) -> int:
    """Write the page, or check it. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m distributed_core.config.reference")
    parser.add_argument("path", nargs="?", default="docs/configuration.md", type=Path)
    parser.add_argument("--check", action="store_true", help="say whether the page is current")
    arguments = parser.parse_args(argv)
    page = render(Path(defaults_path()).read_bytes())
    if not arguments.check:
        arguments.path.write_text(page)
        return 0
    if arguments.path.exists() and arguments.path.read_text() == page:
        return 0
    print(f"{arguments.path} is out of date: run python -m distributed_core.config.reference")
    return 1


if __name__ == "__main__":
    sys.exit(main())

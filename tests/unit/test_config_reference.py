"""The reference page is made from the defaults, and current."""

from pathlib import Path

import pytest

from distributed_core.config import dask_keys, reference
from distributed_core.config.flags import FLAGS
from distributed_core.config.loader import defaults_path, environment_name
from distributed_core.config.schema import SECTIONS, SETTINGS

SOURCE = Path(defaults_path()).read_bytes()
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current():
    assert PAGE.read_text() == reference.render(SOURCE), (
        "run python -m distributed_core.config.reference"
    )


def test_the_page_names_everything():
    page = reference.render(SOURCE)
    for setting in SETTINGS:
        assert f"### `{setting}`\n" in page
        assert f"`{environment_name(setting)}`" in page
    for name in (*FLAGS, *dask_keys.MAPPED, *dask_keys.IGNORED, *dask_keys.RENAMED):
        assert f"`{name}`" in page
    for section in SECTIONS:
        assert page.count(f"\n## {section}\n") == 1


def test_a_setting_without_a_comment_is_refused():
    bare = b"\n".join(
        line for line in SOURCE.splitlines() if b"# File to write the pro" not in line
    )
    with pytest.raises(ValueError, match="has no comment"):
        reference.render(bare)


def test_check_says_whether_the_page_is_current(tmp_path, capsys):
    path = tmp_path / "page.md"
    assert reference.main([str(path), "--check"]) == 1
    assert "is out of date" in capsys.readouterr().out
    assert reference.main([str(path)]) == 0
    assert reference.main([str(path), "--check"]) == 0

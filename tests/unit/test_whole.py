import errno
import os

import pytest

from selfspec_cli.whole import written


def test_a_file_is_replaced_when_all_of_it_is_written(tmp_path):
    file = tmp_path / "made" / "file.json"
    for text in ("first", "second"):
        with written(file) as part:
            part.write_text(text)
            assert part.parent == file.parent  # a file of another disk could not replace it in one step
        assert file.read_text() == text
    assert list(file.parent.iterdir()) == [file]


def test_a_file_is_as_readable_as_any_other_one(tmp_path):
    with written(tmp_path / "file.json") as part:
        part.write_text("text")
        part.chmod(0o600)
    (tmp_path / "usual").touch()
    assert (tmp_path / "file.json").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=repr)
def test_a_full_disk_or_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    file = tmp_path / "file.json"
    file.write_text("good")

    def fill(part):
        part.write_text("half")
        raise failure

    with pytest.raises(type(failure)), written(file) as part:
        fill(part)
    assert file.read_text() == "good"
    assert list(tmp_path.iterdir()) == [file]

"""Moments that no signal may cut in two."""

import os
import signal
from contextlib import suppress

import pytest

from outrider.cli.terminal.files import write_whole
from outrider.registry.children import accepted_interruptions, interruptions_held
from outrider_sanitizer.scratch_files import scratch_directory


def test_a_signal_waits_until_the_scope_is_left():
    reached = []

    def cut():
        with interruptions_held():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        cut()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_is_not_accepted():
    assert accepted_interruptions() == (signal.SIGTERM, signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert accepted_interruptions() == (signal.SIGTERM,)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_scratch_directory_goes_with_its_scope():
    with suppress(KeyboardInterrupt), scratch_directory("outrider-test-") as place:
        (place / "file").touch()
        raise KeyboardInterrupt
    assert not place.exists()


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "before")
    path.chmod(0o600)
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "x" * 100_000 + "\udc80")
    assert path.read_text() == "before"
    write_whole(path, "after")
    assert (path.read_text(), path.stat().st_mode & 0o777, [*tmp_path.iterdir()]) == ("after", 0o600, [path])
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "none" / "a.json", "")
    assert caught.value.filename == str(tmp_path / "none" / "a.json")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="not run: there is no /dev/full")
def test_a_full_disk_is_told_with_the_file(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_whole(tmp_path / "full", "text")
    assert caught.value.filename == str(tmp_path / "full")

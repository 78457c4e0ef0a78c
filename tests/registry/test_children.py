"""Children end with their parent."""

import functools
import os
import signal
import subprocess
import sys

import pytest

from outrider.registry.children import child_session, start_call
from processes import alive, gone

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="not run: there is no /proc, in which it looks processes up"
)


def test_leaving_the_scope_ends_children_of_the_child_too():
    found = []

    def interrupted():
        with child_session(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE) as child:
            found.extend([child, int(child.stdout.readline())])
            assert alive(found[1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    child, inner = found
    assert child.returncode is not None
    assert gone(inner, seconds=30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_told_to_end_by_its_parent_is_deaf_from_its_first_moment(number):
    """Ctrl-C comes to it while it still imports what it will run; afterwards it may ignore what has come."""
    answer = f"print(signal.getsignal({number:d}).name, signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)"
    with start_call(functools.partial(exec, answer), stdout=subprocess.PIPE) as child:
        os.kill(child.pid, number)
        assert child.stdout.readline() == b"SIG_IGN set()\n"
        assert child.wait(60) == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="not run: a call of Linux")
def test_a_parent_that_is_killed_takes_its_child_along():
    waits = "import time; print('ready', flush=True); time.sleep(100)"
    inner = f"from outrider.registry.children import end_with_parent; end_with_parent(); {waits}"
    outer = (
        "import subprocess, sys, time; from outrider.registry.children import child_session\n"
        f"with child_session([sys.executable, '-c', {inner!r}], stdout=subprocess.PIPE) as child:\n"
        "    child.stdout.readline(); print(child.pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    assert gone(pid, seconds=30)


def test_a_call_ends_with_the_process_that_started_it():
    outer = (
        "import functools, time; from outrider.registry.children import start_call\n"
        "print(start_call(functools.partial(time.sleep, 100)).pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    assert gone(pid, seconds=30)

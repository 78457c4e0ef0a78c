"""How much of the host's memory a cache may take, also in a container."""

import pytest

from outrider import get_backend
from outrider.engine.setup import facts

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes control groups as Linux shows them, and says which of them the process is in."""
    monkeypatch.setattr(facts, "_GROUP_LIST", tmp_path / "cgroup")
    monkeypatch.setattr(facts, "_GROUP_FILES", tmp_path / "fs")

    def write(line, files):
        (tmp_path / "cgroup").write_text(f"{line}\n")
        for name, text in files.items():
            file = tmp_path / "fs" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return facts.find_cache_memory(get_backend("cpu"))

    return write


def test_a_container_has_what_its_group_has_left(groups):
    files = {"memory.max": GIB, "memory.current": GIB // 2, "memory.stat": f"anon 5\ninactive_file {GIB // 4}"}
    found = groups("0::/", files)
    assert (found.total, found.free) == (GIB, GIB - GIB // 4)


def test_a_group_around_it_counts_too(groups):
    files = {"a/b/memory.max": "max", "a/b/memory.current": 7, "a/b/memory.stat": ""}
    files |= {"a/memory.max": GIB, "a/memory.current": 2 * GIB, "a/memory.stat": ""}
    found = groups("0::/a/b", files)
    assert (found.total, found.free) == (GIB, 0)


def test_the_first_version_has_other_names(groups):
    files = {"limit_in_bytes": GIB, "usage_in_bytes": GIB // 4, "stat": f"total_inactive_file {GIB // 8}"}
    found = groups("4:cpu,memory:/docker/x", {f"memory/memory.{name}": text for name, text in files.items()})
    assert (found.total, found.free) == (GIB, GIB - GIB // 8)


@pytest.mark.parametrize("line", ["0::/", "3:cpu:/a", "0::/../.."])
def test_without_a_limit_the_host_decides(groups, line):
    free = groups(line, {"memory.max": "max", "memory.current": 1, "memory.stat": ""})
    assert free.free > 0
    assert free.total > free.free

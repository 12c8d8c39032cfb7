from types import SimpleNamespace

import pytest

from memo_compile.costs.host import (
    HostMemory,
    cgroup_memory,
    default_file_budget_bytes,
    host_memory,
)
from memo_compile.errors import InputError

GIB = 2**30


@pytest.fixture
def system(tmp_path):
    """Write a fake /proc and /sys: ``system({path: text})`` returns its root."""

    def build(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return build


def test_version_2_takes_the_tightest_of_the_group_and_its_parents(system):
    root = system(
        {
            "proc/self/cgroup": "0::/kube/pod/app\n",
            "sys/fs/cgroup/kube/memory.max": "max\n",
            "sys/fs/cgroup/kube/pod/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/kube/pod/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/kube/pod/app/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/kube/pod/app/memory.current": "123\n",
        }
    )
    assert cgroup_memory(root) == (4 * GIB, GIB)


def test_the_group_with_the_least_room_counts(system):
    """A large limit that others use up is tighter than a small one of our own."""
    root = system(
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/memory.max": f"{100 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{99 * GIB}\n",
            "sys/fs/cgroup/pod/app/memory.max": f"{50 * GIB}\n",
            "sys/fs/cgroup/pod/app/memory.current": f"{GIB}\n",
        }
    )
    assert cgroup_memory(root) == (100 * GIB, 99 * GIB)


def test_files_are_bounded_by_their_disk(tmp_path, monkeypatch):
    """Also where the folder is still to be made."""
    asked = []

    def usage(path):
        asked.append(path)
        return SimpleNamespace(free=100 * GIB)

    monkeypatch.setattr("memo_compile.costs.host.shutil.disk_usage", usage)
    assert default_file_budget_bytes(str(tmp_path / "new" / "er"), 2) == 45 * GIB
    assert asked == [tmp_path]


def test_cached_files_do_not_count_as_used(system):
    """They go when memory is short; a container that has read its data set is full of them."""
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 7\n",
    }
    assert cgroup_memory(system(files)) == (4 * GIB, GIB)
    first = {
        "proc/self/cgroup": "5:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    assert cgroup_memory(system(first)) == (4 * GIB, 2 * GIB)


def test_version_2_in_a_container_reads_the_mounts_root(system):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}
    assert cgroup_memory(system(files)) == (2 * GIB, None)


def test_version_1_reads_the_memory_controller(system):
    root = system(
        {
            "proc/self/cgroup": "9:name=systemd:/\n5:cpu,memory:/docker/ab\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/docker/ab/memory.usage_in_bytes": "77\n",
        }
    )
    assert cgroup_memory(root) == (GIB, 77)


def test_version_1_inside_a_container_falls_back_to_the_mounts_root(system):
    root = system(
        {
            "proc/self/cgroup": "5:memory:/docker/not-visible-here\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        }
    )
    assert cgroup_memory(root) == (GIB, None)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"},
        {
            "proc/self/cgroup": "5:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    ],
)
def test_no_limit_is_none(system, files):
    assert cgroup_memory(system(files)) == (None, None)


def test_a_limit_that_is_no_number_is_named(system):
    root = system({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "lots\n"})
    with pytest.raises(InputError, match=r"memory\.max: expected a number of bytes, got 'lots'"):
        cgroup_memory(root)


def test_meminfo_is_in_bytes(system):
    meminfo = "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:   600 kB\nHugePages_Total: 0\n"
    host = host_memory(system({"proc/meminfo": meminfo}))
    assert (host.total_bytes, host.available_bytes) == (1000 * 1024, 600 * 1024)
    assert host.usable_bytes == 600 * 1024


@pytest.mark.parametrize(
    ("available", "limit", "used", "usable"),
    [
        (10, None, None, 10),
        (10, 8, 3, 5),
        (10, 8, None, 8),
        (4, 8, 3, 4),
        (10, 8, 9, 0),
        (None, 8, 3, 5),
        (None, None, None, None),
    ],
)
def test_usable_is_the_smaller_of_available_and_left(available, limit, used, usable):
    host = HostMemory(
        total_bytes=None,
        available_bytes=available,
        cgroup_limit_bytes=limit,
        cgroup_used_bytes=used,
        locked_limit_bytes=None,
    )
    assert host.usable_bytes == usable

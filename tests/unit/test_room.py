"""Room is what the tightest limit leaves, file cache that can go counted as free; a refusal names the number needed."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.room import MemoryLevel, budget_bytes, machine_level, refusal, room
from headrace.host.memory_room import MemoryLimits
from headrace.host.procfs import Mount

MIB = 1 << 20
SIZES = st.integers(0, 1 << 45)
LEVELS = st.lists(st.builds(MemoryLevel, st.text(max_size=3), SIZES, SIZES, SIZES), max_size=5)


def test_the_tightest_level_counts_and_inactive_file_cache_is_free():
    outer = MemoryLevel("outer", 1024 * MIB, 1000 * MIB, 0)
    inner = MemoryLevel("inner", 512 * MIB, 500 * MIB, 100 * MIB)
    found = room([machine_level(64_000 * MIB, 32_000 * MIB), inner, outer])
    assert found.tightest is outer
    assert found.free_bytes == (24 - 16) * MIB, "a 64th of the limit stays free"
    assert room([inner]).free_bytes == (12 + 100 - 8) * MIB


def test_without_any_number_nothing_is_refused():
    found = room([])
    assert found.tightest is None
    assert refusal(1 << 50, found, "a batch") is None


@given(LEVELS, SIZES)
def test_room_is_never_negative_and_never_beyond_a_limit(levels, need):
    found = room(levels)
    assert found.free_bytes >= 0
    for level in levels:
        assert found.free_bytes <= level.limit_bytes
        assert found.free_bytes <= max(level.limit_bytes - level.usage_bytes + level.inactive_file_bytes, 0)
    assert (refusal(need, found, "x") is None) == (need <= found.free_bytes)


@given(LEVELS, SIZES, st.integers(1, 16), st.integers(1, 8))
def test_all_ranks_and_loaders_together_keep_within_the_room(levels, own, ranks, loaders):
    found = room(levels)
    one = budget_bytes(found, own_bytes=own, num_local_ranks=ranks, num_loaders=loaders)
    assert own <= one
    assert (one - own) * ranks * loaders <= found.free_bytes


def test_the_users_limit_takes_the_place_of_the_share_but_not_of_the_room():
    found = room([MemoryLevel("c", 640 * MIB, 0, 0)])
    common = {"own_bytes": 10 * MIB, "num_local_ranks": 2, "num_loaders": 1}
    assert budget_bytes(found, memory_limit_bytes=200 * MIB, **common) == 200 * MIB
    assert budget_bytes(found, memory_limit_bytes=2000 * MIB, **common) == 640 * MIB
    assert budget_bytes(found, **common) == 630 * MIB // 4 + 10 * MIB


def test_a_refusal_names_the_limit_the_need_and_what_to_do():
    text = refusal(37 * MIB, room([MemoryLevel("cgroup /a", 64 * MIB, 60 * MIB, 10 * MIB)]), "batch 17")
    assert text == (
        "batch 17 needs 37 MiB of shared memory, but cgroup /a has 13 MiB left (limit 64 MiB, used 60 MiB, of which"
        " 10 MiB file cache that can go, 1 MiB kept free). At least 24 MiB more is needed: raise the limit to"
        " 88 MiB or more, or lower batch_size, num_workers or prefetch_factor."
    )


MEMINFO = (
    "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\nHugePages_Total:       0\n"
)


def _limits(tmp_path, files, cgroup, mount):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def read(path):
        known = {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": cgroup}
        return known.get(path) or (Path(path).read_text() if Path(path).exists() else None)

    return MemoryLimits(read, [mount])


def test_version_2_every_level_with_a_limit_is_read(tmp_path):
    files = {
        "job/one/memory.max": "max\n",
        "job/one/memory.high": "900\n",
        "job/one/memory.current": "11\n",
        "job/one/memory.stat": "anon 5\ninactive_file 7\nactive_file 2\n",
        "job/memory.max": "2048\n",
        "job/memory.high": "max\n",
        "job/memory.current": "99\n",
        "job/memory.stat": "inactive_file 8\n",
    }
    seen = _limits(tmp_path, files, "0::/job/one\n", Mount("/", str(tmp_path), "cgroup2", ("rw",)))
    assert seen.levels() == [
        machine_level(24_000_000 * 1024, 20_000_000 * 1024),
        MemoryLevel(f"cgroup {tmp_path}/job/one", 900, 11, 7),
        MemoryLevel(f"cgroup {tmp_path}/job", 2048, 99, 8),
    ]


def test_version_1_knows_limits_above_what_a_container_shows(tmp_path):
    unlimited = str((1 << 63) - 4096)
    stat = "cache 5\ninactive_file 1\nhierarchical_memory_limit 4096\ntotal_inactive_file 50\n"
    files = {
        "a/memory.limit_in_bytes": unlimited,
        "a/memory.usage_in_bytes": "3000\n",
        "a/memory.stat": stat,
        "memory.limit_in_bytes": unlimited,
        "memory.usage_in_bytes": "9000\n",
        "memory.stat": f"hierarchical_memory_limit {unlimited}\n",
    }
    seen = _limits(tmp_path, files, "4:memory:/a\n0::/\n", Mount("/", str(tmp_path), "cgroup", ("rw", "memory")))
    assert seen.levels()[1:] == [MemoryLevel(f"cgroup {tmp_path}/a", 4096, 3000, 50)]


def test_levels_of_this_machine_can_be_read():
    levels = MemoryLimits().levels()
    assert levels[0].name == "the machine"
    assert 0 < levels[0].free_bytes <= levels[0].limit_bytes

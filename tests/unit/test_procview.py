"""What `/proc` alone can tell is a cause with its evidence; what it can not tell apart is `unknown`, never a guess."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core import procshare
from headrace.core.procview import trainers, view
from headrace.records.run import Loader
from headrace.records.rundir import CgroupSample, GpuSample, HostSample, Machine, ProcSample

S = 1_000_000_000
TRAINER, WORKER = 100, 200
MACHINE = Machine(num_cpus=8, num_allowed_cpus=8)


def proc(pid, at_s, on_cpu=0.0, run_queue=0.0, others=0.0, others_queue=0.0, ppid=1, comm="python", **more):
    """A process that has used these fractions of ``at_s`` seconds."""
    faults = int(more.pop("major_faults_per_s", 0) * at_s)
    return ProcSample(
        pid=pid,
        ppid=ppid,
        comm=comm,
        state=more.pop("state", "S"),
        num_threads=more.pop("num_threads", 4),
        on_cpu_ns=int(on_cpu * at_s * S),
        run_queue_ns=int(run_queue * at_s * S),
        others_on_cpu_ns=int(others * at_s * S),
        others_run_queue_ns=int(others_queue * at_s * S),
        major_faults=faults,
        **more,
    )


def window(trainer, worker=None, num_workers=2, idle=0.0, busy=8.0, seconds=8, host=lambda at_s: {}):
    """Samples of a job once a second: fractions for the trainer and for each worker, idle and busy cores."""
    samples = []
    for at_s in range(seconds + 1):
        procs = [proc(TRAINER, at_s, **trainer)]
        if worker is not None:
            named = {"comm": "pt_data_worker", "ppid": TRAINER, **worker}
            procs += [proc(WORKER + i, at_s, **named) for i in range(num_workers)]
        samples.append(
            HostSample(
                t_ns=at_s * S,
                procs=procs,
                cpu_idle_ns=int(idle * at_s * S),
                cpu_busy_ns=int(busy * at_s * S),
                machine_busy_ns=int(busy * at_s * S),
                **host(at_s),
            )
        )
    return samples


def looks(trainer=(), worker=(), num_workers=2):
    return {TRAINER: list(trainer), **{WORKER + i: list(worker) for i in range(num_workers)}}


WAITING = {"trainer": ["poll pipe"] * 9 + [None]}


def judge(samples, blocked=None, machine=MACHINE):
    loader = view(samples, machine, TRAINER, blocked)
    assert loader.kind == "proc"
    assert loader.stall_frac is None
    assert loader.finding.confidence != "high"
    return loader.finding


def test_workers_blocked_in_a_file_are_storage():
    """Workers that read a file while the trainer waits: storage, with the file and its file system named."""
    words = ["read file /data/a.bin (nfs4)"] * 8 + ["poll pipe"]
    finding = judge(window({"on_cpu": 0.05}, {"on_cpu": 0.05}, idle=4), looks(worker=words, **WAITING))
    assert (finding.cause, finding.confidence) == ("storage", "medium")
    assert "/data/a.bin (nfs4)" in finding.summary
    assert any(row.value == "read file /data/a.bin (nfs4)" for row in finding.evidence)


@pytest.mark.parametrize("word", ["recv socket 10.0.0.3:443", "sleep", "page fault", "lock", "flock file /x (ext4)"])
def test_any_wait_of_the_dataset_is_storage(word):
    """A network peer, a pause, a page of a mapped file and a lock are storage, whatever the number of workers."""
    finding = judge(window({"on_cpu": 0.05}, {"on_cpu": 0.1}), looks(worker=[word] * 9 + [None], **WAITING))
    assert finding.cause == "storage"


def test_workers_on_a_core_with_idle_cores_are_too_few():
    """On a core while a whole allowed core idles: more workers, and how many."""
    finding = judge(window({"on_cpu": 0.1}, {"on_cpu": 0.95}, idle=5.5), looks(worker=[None] * 9, **WAITING))
    assert (finding.cause, finding.confidence) == ("workers", "medium")
    assert (finding.changes[0].from_, finding.changes[0].to) == (2, 7)


def test_workers_on_a_core_without_idle_cores_are_preprocess():
    """On a core, and no core is left: the work itself is too much."""
    finding = judge(window({"on_cpu": 0.1}, {"on_cpu": 0.95}, idle=0.3), looks(worker=[None] * 9, **WAITING))
    assert finding.cause == "preprocess"


def test_a_quota_is_oversubscribed():
    """Ready without a core because the cgroup is throttled: the quota is named."""

    def host(at_s):
        return {"cgroup": CgroupSample(throttled_ns=int(1.2 * at_s * S), num_throttled=at_s)}

    samples = window({"on_cpu": 0.1}, {"on_cpu": 0.3, "run_queue": 0.65}, idle=6, host=host)
    machine = Machine(num_cpus=8, num_allowed_cpus=8, cpu_quota_cores=0.5)
    finding = judge(samples, looks(worker=[None] * 9, **WAITING), machine)
    assert finding.cause == "oversubscribed"
    assert "quota of 0.5 cores" in finding.summary


def test_a_narrow_affinity_is_oversubscribed():
    """Ready without a core while the mask keeps the job from idle ones."""
    worker = {"on_cpu": 0.3, "run_queue": 0.65, "num_allowed_cpus": 1}
    finding = judge(window({"on_cpu": 0.1}, worker, busy=1.0), looks(worker=[None] * 9, **WAITING))
    assert finding.cause == "oversubscribed"
    assert "1 of 8 CPUs" in finding.summary


def test_many_threads_per_worker_are_oversubscribed():
    """Ready without a core because each worker runs a pool of threads of its own."""
    worker = {"on_cpu": 0.3, "run_queue": 0.65, "others": 0.6, "others_queue": 4.0, "num_threads": 17}
    finding = judge(window({"on_cpu": 0.1}, worker), looks(worker=[None] * 9, **WAITING))
    assert finding.cause == "oversubscribed"
    assert "17 threads" in finding.summary


def test_full_cores_alone_are_preprocess_with_oversubscribed_behind():
    """Ready without a core and no limit to lift: fewer threads may not help, so it is said with low confidence."""
    finding = judge(window({"on_cpu": 0.1}, {"on_cpu": 0.3, "run_queue": 0.65}), looks(worker=[None] * 9, **WAITING))
    assert (finding.cause, finding.confidence, finding.runner_up.cause) == ("preprocess", "low", "oversubscribed")


def gpu(util, **more):
    return lambda at_s: {"gpus": [GpuSample(index=0, util_frac=util, **{k: v(at_s) for k, v in more.items()})]}


def test_a_full_gpu_is_compute_whatever_the_workers_do():
    """A GPU that never rests has nothing to gain from data."""
    samples = window({"on_cpu": 0.1}, {"on_cpu": 0.99}, host=gpu(0.97))
    assert judge(samples, looks(worker=[None] * 9, **WAITING)).cause == "compute"


def test_a_gpu_held_back_by_power_is_throttle():
    """A full GPU whose violation time grows is throttled."""
    samples = window({"on_cpu": 0.1}, {"on_cpu": 0.2}, host=gpu(0.97, throttled_power_ns=lambda at_s: at_s * S // 2))
    finding = judge(samples)
    assert finding.cause == "throttle"
    assert finding.share_frac == pytest.approx(0.5)


def test_idle_workers_and_a_half_idle_gpu_are_no_data_problem():
    """Workers ahead of the trainer: launch or sync, which only the device's own clock tells apart."""
    samples = window({"on_cpu": 0.9}, {"on_cpu": 0.1}, host=gpu(0.4))
    finding = judge(samples, looks(trainer=[None] * 9 + ["lock"], worker=["poll pipe"] * 9))
    assert (finding.cause, finding.between) == ("unknown", ("launch", "sync"))
    assert finding.separate_with is not None


def test_a_trainer_that_computes_on_the_cpu_is_compute():
    """Workers ahead, no GPU, the trainer on its cores: it is the limit."""
    finding = judge(window({"on_cpu": 0.95, "others": 3}, {"on_cpu": 0.2}), looks([None] * 9, ["poll pipe"] * 9))
    assert finding.cause == "compute"


def test_a_trainer_without_workers_is_not_guessed():
    """One busy process that loads and computes can not be split from outside."""
    finding = judge(window({"on_cpu": 0.98}), {TRAINER: [None] * 9})
    assert (finding.cause, finding.between) == ("unknown", ("preprocess", "compute"))


def test_a_trainer_without_workers_that_reads_files_is_storage():
    """One process that waits for a file most of the time: storage, and workers are the change."""
    finding = judge(window({"on_cpu": 0.2}), {TRAINER: ["read file /d (ext4)"] * 9 + [None]})
    assert finding.cause == "storage"
    assert "num_workers" in finding.changes[0].what


def test_a_pause_of_a_trainer_without_workers_is_not_guessed():
    """A lock or a pause in the one process may be the dataset's or the device's: both are named."""
    finding = judge(window({"on_cpu": 0.1}), {TRAINER: ["sleep"] * 9})
    assert finding.between == ("storage", "compute")


def test_swapping_is_memory():
    """Pages go out and come back while the job waits for them."""

    def host(at_s):
        return {"psi_memory_ns": at_s * S // 2}

    worker = {"on_cpu": 0.3, "major_faults_per_s": 500}
    samples = window({"on_cpu": 0.1}, worker, host=host)
    for at_s, sample in enumerate(samples):
        sample.procs[1].swap_bytes = at_s << 20
    assert judge(samples).cause == "memory"


def test_without_looks_a_wait_is_not_claimed():
    """Where the kernel does not show what threads wait for, idle workers and slow reads look the same: unknown."""
    finding = judge(window({"on_cpu": 0.1}, {"on_cpu": 0.1}))
    assert (finding.cause, finding.confidence) == ("unknown", "low")


def test_without_looks_saturated_workers_still_tell():
    """Workers that never rest are the limit, also by counters alone, with low confidence."""
    finding = judge(window({"on_cpu": 0.1}, {"on_cpu": 0.97}, idle=3))
    assert (finding.cause, finding.confidence) == ("workers", "low")


def test_waiting_for_idle_workers_is_not_a_fetch_cause():
    """The trainer waits though its workers have nothing to do: a straggler or the transport."""
    finding = judge(window({"on_cpu": 0.05}, {"on_cpu": 0.05}), looks(worker=["poll pipe"] * 9, **WAITING))
    assert finding.between == ("straggler", "transport")


def test_a_slow_link_is_evidence_only_under_load():
    """An idle GPU's link drops to save power: that is no evidence."""
    link = {
        "pcie_gen": lambda _: 1,
        "pcie_width": lambda _: 4,
        "pcie_gen_max": lambda _: 4,
        "pcie_width_max": lambda _: 16,
    }
    loaded = judge(window({"on_cpu": 0.1}, {"on_cpu": 0.2}, host=gpu(0.95, **link)))
    idle = judge(window({"on_cpu": 0.1}, {"on_cpu": 0.2}, host=gpu(0.05, **link)))
    assert "gen 1 x4 of gen 4 x16" in [row.value for row in loaded.evidence]
    assert "PCIe link under load" not in [row.name for row in idle.evidence]


def test_a_process_seen_once_says_nothing():
    """One look has no time in it: unknown, with the reason."""
    assert "not seen long enough" in judge(window({"on_cpu": 0.5}, seconds=0)).summary
    assert judge([]).cause == "unknown"


def test_a_counter_that_steps_back_is_not_a_gain():
    """A thread that ends takes its share of the sum along: the step back counts as nothing."""
    samples = window({"on_cpu": 0.5})
    for sample, others in zip(samples, [0, 5, 9, 1, 2, 3, 3, 3, 3], strict=True):
        sample.procs[0].others_on_cpu_ns = others * S
    assert procshare.share(samples, TRAINER).others_on_cpu_cores == pytest.approx((9 + 2) / 8)


fractions = st.floats(0, 1)
words = st.lists(
    st.sampled_from([None, "poll pipe", "read file /a (nfs)", "lock", "sleep", "page fault", "x"]), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(fractions, fractions, fractions, fractions, fractions, words, words, st.integers(0, 3), st.none() | fractions)
def test_every_job_has_a_finding(on, queue, won, wqueue, idle, main, worker, num_workers, util):
    """Whatever is seen: the three parts sum to 1, shares are fractions, and the record survives its JSON."""
    trainer, workers = {"on_cpu": on, "run_queue": queue}, {"on_cpu": won, "run_queue": wqueue}
    samples = window(trainer, workers if num_workers else None, num_workers, idle, seconds=3, host=gpu(util))
    part = procshare.share(samples, TRAINER, main)
    assert part.on_cpu_frac + part.run_queue_frac + part.blocked_frac == pytest.approx(1)
    assert sum(part.waits.values()) <= part.blocked_frac + 1e-9
    loader = view(samples, MACHINE, TRAINER, looks(main, worker, num_workers))
    assert 0 <= loader.finding.share_frac <= 1 + 1e-9
    assert (loader.finding.cause == "unknown") == (loader.finding.between is not None)
    assert msgspec.json.decode(msgspec.json.encode(loader), type=Loader) == loader


def tree(*rows):
    """Two samples of processes given as pid, parent, name, threads, fraction on a core."""
    return [
        HostSample(t_ns=at * S, procs=[proc(p, at, cpu, ppid=pp, comm=c, num_threads=n) for p, pp, c, n, cpu in rows])
        for at in (1, 2)
    ]


def test_trainers_are_the_parents_of_workers():
    """Under a launcher each rank is a trainer; the launcher is none."""
    rows = [(1, 0, "torchrun", 3, 0.1)]
    rows += [(r, 1, "python", 9, 0.5) for r in (10, 20)]
    rows += [(r + i, r, "pt_data_worker", 2, 0.5) for r in (10, 20) for i in (1, 2)]
    assert trainers(tree(*rows), 1) == [10, 20]


def test_behind_a_forkserver_the_trainer_is_found():
    """Workers of a forkserver belong to the process that asked for them."""
    rows = [(10, 1, "python", 9, 0.5), (11, 10, "python", 1, 0.0), (12, 11, "pt_data_worker", 2, 0.9)]
    assert trainers(tree(*rows), 10) == [10]
    assert view(tree(*rows), MACHINE, 10).num_workers == 1


def test_without_workers_the_busiest_python_trains():
    """A shell that starts Python is not the trainer; without any Python the root stands in."""
    assert trainers(tree((5, 1, "bash", 1, 0.9), (6, 5, "python3.12", 4, 0.5), (7, 5, "python", 1, 0.01)), 5) == [6]
    assert trainers(tree((5, 1, "bash", 1, 0.9)), 5) == [5]

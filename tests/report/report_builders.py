"""Whole runs as headrace would record them, made from a seed: the input of every rendering test."""

from __future__ import annotations

import random

from headrace.records.run import (
    Change,
    Evidence,
    Finding,
    Hotspot,
    Lane,
    Lanes,
    Loader,
    Overhead,
    Process,
    Run,
    RunnerUp,
    Series,
    ServiceNs,
    StepNs,
    TimeFrac,
    WaitFrac,
)

MS = 1_000_000


def time_frac(**parts: float) -> TimeFrac:
    """Parts of the time; what is not named is 0."""
    names = ("step", "stall", "epoch", "other_loader", "copy", "sync", "launch", "rank", "outside")
    return TimeFrac(**{name: parts.get(name, 0.0) for name in names})


def wait_frac(**parts: float) -> WaitFrac:
    names = ("queued", "fetch", "collate", "transport", "pin", "reorder", "unseen")
    return WaitFrac(**{name: parts.get(name, 0.0) for name in names})


def series(num_steps: int, workers: int, body_ms: float, wait_ms: float, seed: int = 1, per_epoch: int = 400) -> Series:
    """A sawtooth: each ``workers``-th step waits long, and each epoch begins with a pause."""
    rng, found, now = random.Random(seed), Series(num_steps_seen=num_steps), 2_000 * MS
    for step in range(num_steps):
        first = step % per_epoch == 0
        wait = wait_ms * (rng.uniform(0.7, 1.3) if step % max(workers, 1) == 0 else rng.uniform(0.0, 0.1))
        wait_ns = int((wait + (900 if first else 0)) * MS)
        body_ns = int(body_ms * rng.uniform(0.95, 1.08) * MS)
        found.step_idx.append(step)
        found.start_ns.append(now)
        found.step_ns.append(wait_ns + body_ns)
        found.wait_ns.append(wait_ns)
        found.stall_ns.append(int(wait_ns * 0.97))
        found.epoch_start.append(first)
        now += wait_ns + body_ns
    return found


def lanes(steps: Series, workers: int, pid: int, max_events: int = 50_000) -> Lanes:
    """Trainer, workers and copies that fit ``steps``."""
    made = Lanes(kinds=["wait", "step", "epoch", "fetch", "collate", "transport", "copy", "backward", "optimizer"])
    made.lanes = [Lane(name="trainer", pid=pid, tid=pid)]
    made.lanes += [Lane(name=f"worker {i}", pid=pid + 1 + i, tid=pid + 1 + i) for i in range(workers)]
    made.lanes.append(Lane(name="copies", pid=pid))
    for i in range(len(steps.step_idx)):
        for event in _step_events(steps, i, workers):
            if len(made.lane) >= max_events:
                return made
            _add(made, *event)
    return made


def _add(made: Lanes, lane: int, kind: str, start: int, dur: int, batch: int) -> None:
    made.lane.append(lane)
    made.kind.append(made.kinds.index(kind))
    made.start_ns.append(start)
    made.dur_ns.append(dur)
    made.batch.append(batch)


def _step_events(steps: Series, i: int, workers: int) -> list[tuple[int, str, int, int, int]]:
    start, wait, total = steps.start_ns[i], steps.wait_ns[i], steps.step_ns[i]
    body = start + wait
    events = [
        (0, "epoch" if steps.epoch_start[i] else "wait", start, wait, i),
        (0, "step", body, total - wait, i),
        (0, "backward", body + (total - wait) // 3, (total - wait) // 2, i),
        (0, "optimizer", body + (total - wait) * 5 // 6, (total - wait) // 8, i),
        (workers + 1, "copy", body, 2 * MS, i),
    ]
    if workers:
        # A worker is busy with one batch for as long as `workers` steps take, so lanes never overlap.
        fetch = max(sum(steps.step_ns[max(0, i - workers) : i]) - 6 * MS, 3 * MS)
        lane, begin = 1 + i % workers, body - fetch - 6 * MS
        events += [(lane, "fetch", begin, fetch, i), (lane, "collate", begin + fetch, 4 * MS, i)]
        events.append((lane, "transport", begin + fetch + 4 * MS, 2 * MS, i))
    return events


FINGERPRINT = {
    "kernel": "6.8.0-45-generic",
    "cpu_model": "AMD EPYC 7543 32-Core Processor",
    "num_cpus": 64,
    "num_allowed_cpus": 16,
    "cpu_quota_cores": 12.5,
    "memory_bytes": 270_000_000_000,
    "in_container": True,
    "gpus": [{"name": "NVIDIA A100-SXM4-40GB", "index": 0}],
    "driver": "550.54.15",
}


def storage(num_steps: int = 1200) -> Run:
    """Reads from NFS block four workers."""
    steps = series(num_steps, 4, 21.0, 130.0)
    finding = Finding(
        cause="storage",
        stall_frac=0.612,
        confidence="high",
        summary="workers wait for files on /mnt/datasets (nfs4) 83 % of the time they fetch",
        share_frac=0.58,
        evidence=[
            Evidence(name="fetch blocked", value=0.83, unit="frac"),
            Evidence(name="fetch on a core", value=0.14, unit="frac"),
            Evidence(name="fetch in the run queue", value=0.03, unit="frac"),
            Evidence(name="read from storage", value=148_213_555, unit="bytes_per_s"),
            Evidence(name="file system", value="nfs4 at /mnt/datasets", unit="text"),
            Evidence(name="mean fetch of a batch", value=139.2 * MS, unit="ns"),
            Evidence(name="idle cores meanwhile", value=11.4, unit="cores"),
            Evidence(name="major faults per batch", value=None, unit="count"),
        ],
        runner_up=RunnerUp(cause="workers", share_frac=0.03),
        changes=[
            Change(
                what="more reads in flight",
                from_=4,
                to=12,
                line="DataLoader(train_set, batch_size=64, num_workers=12, pin_memory=True)",
                speedup=2.31,
                speedup_ci=(2.05, 2.52),
            ),
            Change(what="copy the dataset to a local disk", line="cp -r /mnt/datasets/birds /scratch/", speedup=2.48),
        ],
    )
    loader = Loader(
        site="train.py:31",
        role="train",
        dataset="torchvision.datasets.ImageFolder",
        batch_size=64,
        num_workers=4,
        start_method="fork",
        pin_memory=True,
        prefetch_factor=2,
        persistent_workers=False,
        in_order=True,
        num_iterators=3,
        num_steps=num_steps,
        step_ns=StepNs(mean=54.1 * MS, p50=24.9 * MS, p95=171.8 * MS),
        stall_frac=0.612,
        steady_stall_frac=0.58,
        stall_ci=(0.561, 0.602),
        time_frac=time_frac(step=0.374, stall=0.58, epoch=0.032, copy=0.014),
        wait_frac=wait_frac(fetch=0.91, queued=0.06, collate=0.02, transport=0.008, pin=0.002),
        service_ns=ServiceNs(fetch=139.2 * MS, fetch_p95=190.0 * MS, collate=4.1 * MS, step=21.0 * MS),
        samples_per_s=1183.2,
        ceiling_samples_per_s=3049.9,
        hotspots=[
            Hotspot(
                share_frac=0.71,
                site="data/birds.py:48",
                function="__getitem__",
                state="file on nfs4",
                what="reading /mnt/datasets",
            ),
            Hotspot(
                share_frac=0.12, site="PIL/ImageFile.py:300", function="load", state="running", what="PIL JPEG decode"
            ),
        ],
        series=steps,
        lanes=lanes(steps, 4, 4711),
        finding=finding,
    )
    return _run(finding, [Process(pid=4711, argv=["train.py"], python="3.12.4", torch="2.6.0", loaders=[loader])])


def compute(simulated: bool = False, num_steps: int = 1500) -> Run:
    """The device is the limit."""
    steps = series(num_steps, 4, 92.0, 1.2, per_epoch=500)
    finding = Finding(
        cause="compute",
        stall_frac=0.004,
        confidence="high",
        summary="batches are ready before the device asks for them",
        share_frac=0.97,
        evidence=[
            Evidence(name="batches ready when asked", value=0.993, unit="frac"),
            Evidence(name="ceiling over now", value=1.004, unit="ratio"),
        ],
    )
    loader = Loader(
        site="train.py:31",
        role="train",
        dataset="torchvision.datasets.ImageFolder",
        batch_size=64,
        num_workers=4,
        start_method="fork",
        pin_memory=True,
        prefetch_factor=2,
        persistent_workers=True,
        num_iterators=3,
        num_steps=num_steps,
        step_ns=StepNs(mean=93.4 * MS, p50=93.2 * MS, p95=98.0 * MS),
        stall_frac=0.004,
        steady_stall_frac=0.003,
        stall_ci=(0.002, 0.005),
        time_frac=time_frac(step=0.986, stall=0.003, epoch=0.001, outside=0.010),
        wait_frac=wait_frac(fetch=0.6, transport=0.4),
        samples_per_s=685.2,
        ceiling_samples_per_s=688.0,
        simulated=simulated,
        series=steps,
        lanes=lanes(steps, 4, 900),
        finding=finding,
    )
    return _run(finding, [Process(pid=900, python="3.12.4", torch="2.6.0", loaders=[loader])])


def unknown() -> Run:
    """The evidence does not separate two causes; nothing else is known either."""
    finding = Finding(
        cause="unknown",
        stall_frac=0.33,
        confidence="low",
        summary="fetch was neither seen on a core nor blocked: schedstat could not be read",
        between=("storage", "preprocess"),
        separate_with="headrace run --steps 200 train.py",
        runner_up=RunnerUp(cause="preprocess", share_frac=0.16),
    )
    loader = Loader(site="train.py:9", role="unknown", num_steps=40, stall_frac=0.33, finding=finding)
    run = _run(finding, [Process(pid=77, loaders=[loader])])
    run.fingerprint, run.overhead = {}, None
    run.unavailable = {
        "/processes/0/loaders/0/service_ns": "/proc/77/schedstat: permission denied",
        "/processes/0/loaders/0/step_ns": "fewer than 50 steady steps",
        "/fingerprint/gpus": "no NVIDIA driver",
        "/fingerprint/driver": "no NVIDIA driver",
    }
    return run


def ranks(num_ranks: int = 8, num_steps: int = 300) -> Run:
    """A job of several ranks, each with a training and a validation loader, and processes that never reported."""
    processes = []
    for rank in range(num_ranks):
        run = storage(num_steps)
        loader = run.processes[0].loaders[0]
        loader.stall_frac = 0.5 + 0.1 * rank / num_ranks
        assert loader.finding is not None
        loader.finding.stall_frac = loader.stall_frac
        check = Loader(site="train.py:58", role="validation", num_workers=2, num_steps=40, stall_frac=0.1)
        processes.append(Process(pid=5000 + rank, rank=rank, loaders=[loader, check]))
    processes += [Process(pid=6000 + i, note="started with -I: no hooks") for i in range(3)]
    return _run(processes[num_ranks - 1].loaders[0].finding, processes)


def attached() -> Run:
    """A job seen from /proc alone."""
    summary = "the trainer sleeps while one worker is busy"
    finding = Finding(cause="workers", stall_frac=None, confidence="low", summary=summary)
    loader = Loader(site="pid 31337", role="unknown", kind="proc", finding=finding)
    run = _run(finding, [Process(pid=31337, note="attached: seen from /proc", loaders=[loader])])
    run.unavailable = {"/processes/0/loaders/0/stall_frac": "the program was not started under headrace"}
    return run


def nothing() -> Run:
    """A program that never trained, killed while headrace was away."""
    return Run(headrace="0.1.0", command=["sh", "-c", "true"], ended="lost")


def hostile() -> Run:
    """Strings of the user that try to leave their place: markup, script ends, terminal escapes, a lone surrogate."""
    run = storage(60)
    evil = "</script><script>document.title='owned'</script><!-- [bold]x[/bold] \x1b[31m {{ 7*7 }} & \" '"
    run.command = ["python", evil]
    loader = run.processes[0].loaders[0]
    loader.site, loader.dataset = evil, evil
    assert run.finding is not None
    assert loader.lanes is not None
    run.finding.summary = evil
    run.finding.changes[0].line = evil
    run.finding.evidence.append(Evidence(name=evil, value=evil, unit="text"))
    loader.lanes.lanes[0].name = evil
    run.fingerprint = {evil: evil, "nested": {"a": [1, {"b": evil}]}}
    run.unavailable["/" + evil] = evil
    return run


def largest() -> Run:
    """The largest record there can be in one process: 5,000 steps and 50,000 events, beside 64 ranks."""
    run = ranks(64)
    loader = run.processes[0].loaders[0]
    loader.series = series(5_000, 8, 21.0, 130.0)
    loader.series.num_steps_seen = 120_000
    loader.lanes = lanes(loader.series, 8, 4711)
    run.finding = loader.finding
    return run


#: Every shape of a record, with few steps: validating 50,000 events by schema takes jsonschema seconds.
SMALL = {
    "storage": lambda: storage(40),
    "compute": lambda: compute(num_steps=40),
    "simulated": lambda: compute(simulated=True, num_steps=40),
    "unknown": unknown,
    "ranks": lambda: ranks(2, 20),
    "attached": attached,
    "nothing": nothing,
    "hostile": hostile,
}
ALL = {
    "storage": storage,
    "compute": compute,
    "unknown": unknown,
    "ranks": ranks,
    "attached": attached,
    "nothing": nothing,
    "hostile": hostile,
}


def _run(finding: Finding | None, processes: list[Process]) -> Run:
    return Run(
        headrace="0.1.0",
        command=["python", "train.py", "--data", "/mnt/datasets/birds"],
        started_unix_ns=1_760_000_000 * 10**9,
        duration_ns=67_300 * MS,
        ended="exit",
        exit_code=0,
        finding=finding,
        processes=processes,
        fingerprint=dict(FINGERPRINT),
        overhead=Overhead(trainer_frac=0.0004, trainer_ns_per_step=4120.0, sampler_cores=0.021),
    )

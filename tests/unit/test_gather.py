"""A run directory becomes a record, whatever state it was left in."""

from __future__ import annotations

import gc
import json
import struct
import time

import msgspec
import pytest

from headrace.errors import RecordError
from headrace.records import rundir as f
from headrace.records.run import Run
from headrace.run.gather import gather, read_traces
from tests.unit.synth import MS, US, Kind, Service, Trainer, encode, machine, write_rundir


@pytest.fixture
def trainer():
    made = Trainer()
    made.train(made.loader(num_workers=2, batches=30, fetch=Service(blocked_ns=40 * MS)), epochs=2)
    return made


@pytest.fixture
def rundir(tmp_path, trainer):
    return write_rundir(tmp_path, [trainer])


def test_a_whole_run_is_read(rundir, trainer):
    """Everything that agent and sampler wrote is in the record, which survives its own JSON."""
    run = gather(rundir)
    assert (run.ended, run.exit_code) == ("exit", 0)
    assert run.finding.cause == "storage"
    (process,) = run.processes
    assert process.pid == trainer.pid
    assert process.torch == "2.14.1"
    assert process.loaders[0].num_steps == 60
    assert run.fingerprint["num_cpus"] == 8
    assert msgspec.json.decode(msgspec.json.encode(run), type=Run) == run


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format": 3}', b'{"command": "x"}', None])
def test_a_damaged_header_is_a_record_error(rundir, damage):
    """Without a readable run.json the directory is none of ours, and the message names it."""
    (rundir / "run.json").unlink()
    if damage is not None:
        (rundir / "run.json").write_bytes(damage)
    with pytest.raises(RecordError, match=r"run\.json"):
        gather(rundir)


def test_a_run_whose_headrace_was_killed_is_lost_but_reported(rundir):
    """Without end.json the end is unknown, and the finding is there all the same."""
    (rundir / "end.json").unlink()
    run = gather(rundir)
    assert run.ended == "lost"
    assert run.exit_code is None
    assert "/exit_code" in run.unavailable
    assert run.finding is not None


def test_torn_lines_and_files_lose_only_themselves(rundir, trainer):
    """A process and a sampler killed in the middle of a write leave all that they wrote before."""
    for path in rundir.glob("*.meta"):
        path.write_bytes(path.read_bytes() + b'5\n[]\n"text"\nnull\n{}\n\xff\xfe\n{"k": "stacks", "ro')
    ev = rundir / f"{trainer.pid}-{trainer.born}.ev"
    ev.write_bytes(ev.read_bytes()[:-100])
    host = rundir / "host.jsonl"
    host.write_bytes(host.read_bytes() + b"\n{}\n[1]\n" + host.read_bytes()[-200:-60])
    run = gather(rundir)
    assert run.processes[0].loaders[0].num_steps >= 59


@pytest.mark.parametrize("name", ["host.jsonl", "*.ev", "*.meta", "100-*.ev", "101-*"])
def test_missing_files_raise_nothing(rundir, name):
    """Any file may be missing: the record says less."""
    for path in rundir.glob(name):
        path.unlink()
    run = gather(rundir)
    assert run.finding is not None or run.unavailable["/finding"]


def test_a_process_without_a_first_line_is_known_by_its_file(tmp_path):
    """A child forked before torch was imported starts without a line; the file's name says who it is."""
    (tmp_path / "77-5.meta").write_text('{"k": "worker", "worker": 0}\n')
    (tmp_path / "odd.meta").write_text("{}\n")
    (tmp_path / "88-6.ev").write_bytes(encode([]))
    (trace,) = read_traces(tmp_path)
    assert (trace.pid, trace.start_ns) == (77, 5)
    assert trace.is_worker


def test_empty_files_are_processes_that_did_nothing(tmp_path):
    """An empty meta and an empty event file raise nothing."""
    (tmp_path / "77-5.meta").write_bytes(b"")
    (tmp_path / "77-5.ev").write_bytes(b"")
    (trace,) = read_traces(tmp_path)
    assert trace.num_lost == 0
    assert not trace.is_trainer


def test_python_processes_that_never_reported_are_named(rundir):
    """A Python process that was seen but left no file is in the record with the reason; a glimpse of one is not."""
    lines = (rundir / "host.jsonl").read_bytes().splitlines()
    for i, number in enumerate((2, 3, 4)):
        sample = json.loads(lines[number])
        silent = {"pid": 900, "ppid": 1, "comm": "python3", "state": "R", "num_threads": 1}
        sample["procs"] += [silent] + [{**silent, "pid": 901}] * (i == 0)
        lines[number] = json.dumps(sample).encode()
    (rundir / "host.jsonl").write_bytes(b"\n".join(lines))
    run = gather(rundir)
    notes = {process.pid: process.note for process in run.processes}
    assert "-I" in notes[900]
    assert 901 not in notes


def test_secrets_of_the_command_are_not_in_the_record(rundir):
    """What the command line gave away is hidden in what others will read."""
    header = json.loads((rundir / "run.json").read_text())
    header["command"] = ["train.py", "--api-key", "s3cr3t"]
    (rundir / "run.json").write_text(json.dumps(header))
    assert b"s3cr3t" not in msgspec.json.encode(gather(rundir))


def test_what_is_missing_has_a_reason(tmp_path):
    """Each null of the record has its pointer and its reason."""
    trainer = Trainer()
    trainer.train(trainer.loader(batches=1, batch_size=None))
    run = gather(write_rundir(tmp_path, [trainer], machine()))
    loader = "/processes/0/loaders/0"
    assert run.processes[0].loaders[0].samples_per_s is None
    assert f"{loader}/samples_per_s" in run.unavailable
    assert f"{loader}/steady_stall_frac" in run.unavailable


def test_the_collector_is_as_it_was(rundir):
    """Gathering switches Python's collector off for a moment and leaves it as it was."""
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            gather(rundir)
            with pytest.raises(RecordError):
                gather(rundir / "nowhere")
            assert gc.isenabled() is on
        finally:
            gc.enable()


@pytest.mark.slow
def test_a_full_event_file_costs_little_cpu(tmp_path):
    """A file with its whole head and ring is gathered in a few seconds of CPU: no step of it is quadratic."""
    (tmp_path / "run.json").write_bytes(
        msgspec.json.encode(
            f.RunHeader(command=[], headrace_version="", headrace_pid=1, started_mono_ns=0, started_unix_ns=0)
        )
    )
    start = {"k": "start", "pid": 5, "t_ns": 0}
    loader = {"k": "loader", "loader": 1, "site": "t.py:1", "num_workers": 0}
    lines = [start, loader, {"k": "iter", "iter": 2, "loader": 1, "workers": [], "queue": 0}]
    (tmp_path / "5-0.meta").write_text("\n".join(map(json.dumps, lines)))
    pack, num = struct.Struct("<8Q").pack, f.HEAD_EVENTS + f.RING_EVENTS
    step = (
        (Kind.NEXT, 0, 100 * US, 2, 0, 0, 90 * US, f.NONE), (Kind.FETCH, 0, 90 * US, 0, f.NONE, 0, 80 * US, 0),
        (Kind.BACKWARD, 200 * US, 500 * US, 0, 0, 0, 0, 0), (Kind.OPTIMIZER, 500 * US, 900 * US, 0, 0, 0, 0, 0),
    )  # fmt: skip
    body = [pack(kind, i * MS + t0, i * MS + t1, *rest) for i in range(1, num // 4 + 1) for kind, t0, t1, *rest in step]
    head = struct.pack("<2Q", f.EVENT_MAGIC, num).ljust(f.EVENT_HEADER_BYTES, b"\0")
    (tmp_path / "5-0.ev").write_bytes(head + b"".join(body))
    before = time.process_time()
    run = gather(tmp_path)
    assert run.processes[0].loaders[0].num_steps == 98_304
    # Two seconds of a quiet core; the rest is for machines that share one.
    assert time.process_time() - before < 10

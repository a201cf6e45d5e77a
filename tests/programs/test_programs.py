"""Other people's programs run unmodified under `headrace run`: `make test-programs`.

Each program runs as a person would start it. headrace must leave its exit code and output alone and see what it did.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.programs

SCRIPTS = Path(__file__).parent / "scripts"


def need(*modules):
    """Skips when a program's packages are missing: they come with `pip install '.[programs]'`."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing: pip install 'headrace[programs]'")


def console_script(name):
    """The command as a person types it, from the environment that runs the tests."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no command {name}")
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Generated images, made once."""
    need("numpy", "PIL")
    out = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, SCRIPTS / "make_data.py", out], check=True, timeout=60)
    return out


@pytest.fixture
def watch(tmp_path):
    """Runs a command under headrace in an empty folder; returns its output and the record."""

    def run(*command):
        environment = {
            **os.environ,
            # Scripts run under the python of PATH, also where no environment was activated.
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
            "OMP_NUM_THREADS": "1",
            # Programs that would ask the network, told not to.
            "HF_HUB_OFFLINE": "1",
            "YOLO_OFFLINE": "true",
            "YOLO_AUTOINSTALL": "false",
            "YOLO_CONFIG_DIR": str(tmp_path),
        }
        record = tmp_path / "run.json"
        done = subprocess.run(
            [sys.executable, "-m", "headrace", "run", "--json", str(record), *map(str, command)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout, checked(record)

    return run


def checked(path):
    """Reads a record and holds it to what every record promises."""
    import jsonschema

    run = json.loads(path.read_text(encoding="utf-8"))
    schema = json.loads((Path(_package_dir()) / "records" / "run.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(run, schema)
    assert (run["format"], run["ended"], run["exit_code"]) == ("headrace.run/1", "exit", 0)
    assert run["finding"] is not None
    return run


def _package_dir():
    import headrace

    return Path(headrace.__file__).parent


def loaders(run, role=None):
    found = [loader for process in run["processes"] for loader in process["loaders"]]
    return [loader for loader in found if role in (None, loader["role"])]


def assert_seen(loader, *, site, steps, num_workers):
    """A loader is named by the user's own line, counted in full, and its time adds up."""
    assert site in loader["site"], loader["site"]
    assert loader["num_steps"] == steps
    assert loader["num_workers"] == num_workers
    assert sum(loader["time_frac"].values()) == pytest.approx(1, abs=1e-6)
    assert 0 <= loader["stall_frac"] <= 1


def test_lightning_fit(watch):
    """Lightning's Trainer.fit: both loaders by the user's own line, validation told from training."""
    need("lightning")
    said, run = watch(SCRIPTS / "lightning_fit.py")
    assert "done 200" in said
    (train,) = loaders(run, "train")
    assert_seen(train, site="lightning_fit.py:", steps=200, num_workers=2)
    (validation,) = loaders(run, "validation")
    assert "lightning_fit.py:" in validation["site"]
    assert validation["num_workers"] == 1


def test_transformers_trainer(watch, tmp_path):
    """Transformers' Trainer makes its loaders itself: they bear the line that called train(), and stay apart."""
    need("transformers", "accelerate")
    said, run = watch(SCRIPTS / "transformers_trainer.py", tmp_path / "out")
    assert "done 100" in said
    (train,) = loaders(run, "train")
    assert_seen(train, site="transformers_trainer.py:", steps=100, num_workers=2)
    (validation,) = loaders(run, "validation")
    assert validation["num_steps"] == 20


def test_accelerate_launch(watch):
    """`accelerate launch` starts a child, and the child reports: its loader is found behind the wrapper."""
    need("accelerate")
    said, run = watch(
        console_script("accelerate"), "launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", SCRIPTS / "accelerate_loop.py",
    )  # fmt: skip
    assert "done 0 256" in said
    (train,) = loaders(run, "train")
    assert_seen(train, site="accelerate_loop.py:", steps=256, num_workers=1)


def test_torchrun_with_two_ranks(watch):
    """`torchrun` with two gloo ranks gives one report with both ranks in it."""
    need("torch")
    said, run = watch(console_script("torchrun"), "--nproc-per-node", "2", SCRIPTS / "ddp_gloo.py")
    assert "done 0 128" in said
    assert "done 1 128" in said
    ranks = [process for process in run["processes"] if process["loaders"]]
    assert sorted(process["rank"] for process in ranks) == [0, 1]
    for process in ranks:
        (train,) = process["loaders"]
        assert train["role"] == "train"
        assert_seen(train, site="ddp_gloo.py:", steps=128, num_workers=1)


def test_yolo_train(watch, data, tmp_path):
    """`yolo train` has no line of the user's at all: its InfiniteDataLoader is still found, with every batch."""
    need("ultralytics")
    _, run = watch(
        console_script("yolo"), "train", "model=yolo11n.yaml", f"data={data / 'yolo' / 'data.yaml'}", "imgsz=64",
        "epochs=2", "batch=8", "workers=2", "device=cpu", "plots=False", "amp=False", f"project={tmp_path / 'yolo'}",
    )  # fmt: skip
    # On a CPU ultralytics sets the number of workers to 0 by itself; 2 epochs of 4 batches.
    (train,) = loaders(run, "train")
    assert train["num_steps"] == 8
    assert train["num_workers"] == 0
    (validation,) = loaders(run, "validation")
    assert validation["num_steps"] == 3


def test_timm_loader(watch, data):
    """timm's create_loader, with its prefetching wrapper off, persistent workers on, and a validation loop."""
    need("timm")
    said, run = watch(SCRIPTS / "timm_loader.py", data / "folder")
    assert "done 36" in said
    (train,) = loaders(run, "train")
    assert_seen(train, site="timm_loader.py:", steps=36, num_workers=2)
    (validation,) = loaders(run, "validation")
    assert validation["num_steps"] == 9

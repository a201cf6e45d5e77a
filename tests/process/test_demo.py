"""`headrace demo`: real photographs, a plain script, the advice carried out, prediction beside measurement."""

import importlib.util

import pytest

from headrace.demo import story
from headrace.demo.advice import first_applicable, options_for, subject
from headrace.demo.images import cut
from headrace.demo.part import Part, PartError, play
from headrace.demo.show import comparison, verdict
from headrace.records.run import Change, Finding, Loader, Process, Run

pytest.importorskip("skimage", reason="pip install 'headrace[demo]'")
Image = pytest.importorskip("PIL.Image", reason="pip install 'headrace[demo]'")


def a_run(changes=(), loaders=()):
    finding = Finding(
        cause="workers", stall_frac=0.6, confidence="high", summary="one process loads", changes=[*changes]
    )
    return Run(
        headrace="0", command=["x"], ended="exit", finding=finding, processes=[Process(pid=1, loaders=[*loaders])]
    )


def a_part(tmp_path, steps_per_s=10.0, **run):
    return Part(run=a_run(**run), steps_per_s=steps_per_s, device="SIMULATED, 40 ms a step", html=tmp_path / "x.html")


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (Change(what="num_workers", to=2), ["--workers", "2"]),
        (Change(what="prefetch_factor", to=4), ["--prefetch", "4"]),
        (Change(what="persistent_workers", to=True), ["--persistent"]),
        (Change(what="pin_memory", to=True), ["--pin"]),
        (Change(what="threads per worker", to=1, line="torch.set_num_threads(1)"), ["--threads", "1"]),
        (
            Change(
                what="num_workers", to=2, line="DataLoader(d, batch_size=16, num_workers=2, persistent_workers=True)"
            ),
            ["--workers", "2", "--persistent"],
        ),
        (Change(what="pin_memory", to=False), None),
        (Change(what="num_workers", to=None), None),
        (Change(what="storage", to="a local disk"), None),
    ],
)
def test_advice_becomes_the_scripts_options(change, options):
    """Only what the script has an option for is carried out."""
    assert options_for(change) == options


def test_the_first_change_that_can_be_carried_out_is_taken():
    """One change at a time, because each prediction holds for its change alone."""
    change = Change(what="num_workers", to=2)
    assert first_applicable(a_run([Change(what="storage"), change, Change(what="pin_memory", to=True)])) is change
    assert first_applicable(Run(headrace="0", command=[], ended="exit")) is None


def test_the_training_loader_is_the_subject():
    """Validation never stands in for training, however many steps it had."""
    train, validation = Loader(site="a", role="train", num_steps=5), Loader(site="b", role="validation", num_steps=9)
    assert subject(a_run(loaders=[validation, train])) is train
    assert subject(a_run()) is None


def test_prediction_and_measurement_stand_side_by_side(tmp_path):
    """The closing lines give both numbers, and say that the device was simulated."""
    change = Change(what="num_workers", from_=0, to=2, speedup=2.0, speedup_ci=(1.8, 2.2))
    lines = verdict(a_part(tmp_path), change, a_part(tmp_path, steps_per_s=21.0))
    assert "device: SIMULATED, 40 ms a step" in lines
    assert "predicted: 2.00 x (1.80 to 2.20)" in lines
    assert "measured:  2.10 x (by the script's own clock)" in lines


def test_a_value_that_was_not_measured_is_never_zero(tmp_path):
    """A missing number reads so."""
    table = comparison(a_part(tmp_path), None)
    assert list(table.columns[1].cells) == ["workers", "not measured", "not measured", "10.0"]


def test_nothing_to_change_is_said(tmp_path):
    """Without advice there is no second part, and the reader learns why."""
    assert verdict(a_part(tmp_path), None, None)[-1].startswith("nothing to change")


def test_images_are_real_jpegs_of_imagenet_size_and_the_same_everywhere(tmp_path):
    """Each cut is a JPEG of about 375 x 500 in the folder of its photograph, with the same bytes in every run."""
    first, second = list(cut(tmp_path / "a", 24)), list(cut(tmp_path / "b", 24))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert len({path.parent.name for path in first}) >= 3
    for path in first:
        with Image.open(path) as image:
            assert image.format == "JPEG"
            assert 400 <= image.width <= 560
            assert 300 <= image.height <= 420


def test_a_missing_package_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path):
    """Whoever lacks torchvision is told the one command, before anything runs."""
    find_spec = importlib.util.find_spec
    gone = ("torchvision", "skimage")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find_spec(name))
    assert story.main(out_dir=tmp_path / "out") == 2
    said = capsys.readouterr().err.strip()
    assert said == "headrace demo needs torchvision and scikit-image: pip install 'headrace[demo]'"
    assert not (tmp_path / "out").exists()


def test_a_step_without_length_is_one_line_and_exit_code_2(capsys, tmp_path):
    """Bad input is told before anything runs."""
    assert story.main(step_ms=0, out_dir=tmp_path / "out") == 2
    assert capsys.readouterr().err.strip() == "headrace demo: the step must be longer than 0 ms, got 0"


@pytest.mark.slow
def test_a_script_that_fails_shows_its_own_words(tmp_path):
    """When a part fails the reader sees the program's own error."""
    script = tmp_path / "train.py"
    script.write_text("raise RuntimeError('the disk is on fire')\n")
    with pytest.raises(PartError, match="the disk is on fire"):
        play("before", script, [], tmp_path, lambda step: None)


@pytest.mark.slow
def test_the_demo_finds_too_few_workers_and_ends_with_a_report(monkeypatch, capsys, tmp_path):
    """Two commands to an answer: the finding, before and after, and the path of one HTML file in the last line."""
    pytest.importorskip("torchvision", reason="pip install 'headrace[demo]'")
    monkeypatch.setattr(story, "NUM_STEPS", 60)
    monkeypatch.setattr(story, "NUM_IMAGES", 120)
    monkeypatch.setattr(story, "MAX_PART_S", 8)
    assert story.main(step_ms=40, out_dir=tmp_path, keep=True) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert any("SIMULATED" in line for line in lines)
    assert lines[-1] == f"report: {tmp_path / 'before.html'}"
    assert (tmp_path / "before.html").stat().st_size > 10_000
    assert len(list((tmp_path / "images").glob("*/*.jpg"))) == 120

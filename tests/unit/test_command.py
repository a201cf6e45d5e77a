"""Which program the words mean, and what of them is recorded."""

from __future__ import annotations

import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.run.command import Program, resolve
from headrace.run.redact import HIDDEN, redact


def make_executable(path, text="#!/bin/sh\n"):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with train.py and a PATH with python, python3 and torchrun."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name in ("python", "python3", "torchrun", "tool.py"):
        make_executable(bin_dir / name)
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("")
    monkeypatch.chdir(work)
    return work, {"PATH": f"{tmp_path}/nothing{os.pathsep}{bin_dir}"}, bin_dir


def test_script_runs_under_the_callers_python(place):
    """A .py file runs under the first python of PATH, with the words as they are."""
    _, environ, bin_dir = place
    assert resolve(["train.py", "-m", "--x"], environ) == Program(
        path=f"{bin_dir}/python", argv=("python", "train.py", "-m", "--x")
    )


def test_python3_where_there_is_no_python(place):
    """Debian has no `python`; python3 is taken then."""
    _, environ, bin_dir = place
    (bin_dir / "python").unlink()
    assert resolve(["train.py"], environ).argv == ("python3", "train.py")
    (bin_dir / "python3").unlink()
    with pytest.raises(UsageError, match="neither python nor python3 is on PATH"):
        resolve(["train.py"], environ)


def test_module(place):
    """`-m` means python -m, and needs a name."""
    _, environ, bin_dir = place
    assert resolve(["-m", "pkg.mod", "x"], environ) == Program(
        path=f"{bin_dir}/python", argv=("python", "-m", "pkg.mod", "x")
    )
    for words in (["-m"], ["-m", ""], ["-m", "--steps"]):
        with pytest.raises(UsageError, match="-m needs the name of a module"):
            resolve(words, environ)


def test_anything_else_is_executed_as_it_is(place):
    """Commands are found on PATH, paths are taken as they are, argv[0] is the word itself."""
    work, environ, bin_dir = place
    assert resolve(["torchrun", "train.py"], environ) == Program(
        path=f"{bin_dir}/torchrun", argv=("torchrun", "train.py")
    )
    make_executable(work / "go.sh")
    assert resolve(["./go.sh", "a"], environ) == Program(path="./go.sh", argv=("./go.sh", "a"))


def test_command_whose_name_ends_in_py(place):
    """An installed command may be called tool.py; a script of that name in the working directory comes first."""
    work, environ, bin_dir = place
    assert resolve(["tool.py"], environ).path == f"{bin_dir}/tool.py"
    (work / "tool.py").write_text("")
    assert resolve(["tool.py"], environ).argv == ("python", "tool.py")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian.py"], r"no such script: trian.py \(in .*work\); did you mean train.py\?"),
        (["no/where.py"], "no such script: no/where.py"),
        (["torchrnu"], r"no such command: torchrnu is not on PATH; did you mean torchrun\?"),
        (["./gone"], "no such command: ./gone"),
        (["folder.py"], "folder.py is a directory"),
        (["./folder.py/"], "is a directory"),
        (["./plain"], r"./plain is not executable: chmod \+x ./plain, or .*headrace run sh ./plain"),
        (["plain"], "for the file in this directory write headrace run sh plain"),
        (["ready"], "for the file in this directory write headrace run ./ready"),
        ([""], "empty word"),
    ],
)
def test_what_cannot_run_is_said(place, words, said):
    """What was wrong, what was there, and what to write instead."""
    work, environ, _ = place
    (work / "folder.py").mkdir()
    (work / "plain").write_text("echo\n")
    make_executable(work / "ready")
    with pytest.raises(UsageError, match=said):
        resolve(words, environ)


SECRET = "s3cr3tvalue"


@pytest.mark.parametrize(
    "words",
    [
        ["t.py", "--token", SECRET],
        ["t.py", "--token=" + SECRET],
        ["t.py", "--hf_token", SECRET],
        ["t.py", "--api-key=" + SECRET],
        ["t.py", "-api_key", SECRET],
        ["t.py", "--wandb-key", SECRET],
        ["t.py", "--PASSWORD", SECRET],
        ["t.py", "key=" + SECRET],
        ["t.py", "+logger.wandb.api_key=" + SECRET],
        ["t.py", "clientSecret=" + SECRET],
        ["t.py", "--auth", SECRET],
        ["t.py", "hf_" + SECRET],
        ["t.py", "--x=sk-" + SECRET],
        ["t.py", "https://me:" + SECRET + "@host/path"],
        ["t.py", "https://" + SECRET + "@host/path"],
        ["t.py", "https://host/path?a=1&X-Amz-Signature=" + SECRET + "&b=2"],
        ["t.py", "https://host/path?token=" + SECRET],
        ["env", "WANDB_API_KEY=" + SECRET, "python", "t.py"],
        ["sh", "-c", "export HF_TOKEN=" + SECRET + "; python t.py"],
        ["sh", "-c", "python t.py --token " + SECRET],
        ["sh", "-c", "python t.py --password '" + SECRET + " more'"],
        ["t.py", '{"api_key": "' + SECRET + '"}'],
        ["t.py", "--header", "Authorization: Bearer " + SECRET],
        ["t.py", "ghp_0123456789" + SECRET],
        ["t.py", "eyJhbGciOiJI.eyJzdWIi." + SECRET],
    ],
)
def test_secrets_are_not_recorded(words):
    """A value that looks like a secret becomes ***; the number of words stays."""
    done = redact(words)
    assert not any(SECRET in word for word in done)
    assert any(HIDDEN in word for word in done)
    assert len(done) == len(words)


@pytest.mark.parametrize(
    "words",
    [
        ["python", "train.py", "--lr", "0.1", "--tokenizer", "gpt2", "--tokenizer-name=x", "--workers", "4"],
        ["torchrun", "--nproc-per-node", "2", "train.py", "data.root=/data/keys", "--author", "me"],
        ["t.py", "--monkey", "x", "--keyframes=3", "https://host/a?page=2", "disk-first", "task-classification"],
        ["-m", "pkg.secrets", "--out", "/a/b@c"],
    ],
)
def test_what_is_no_secret_stays(words):
    """A command that holds no secret is recorded as it was written."""
    assert redact(words) == words


@given(st.lists(st.text(alphabet=string.printable, max_size=30), max_size=8))
def test_redaction_keeps_the_number_of_words(words):
    """Whatever the words are, redaction neither fails nor adds nor drops one."""
    assert len(redact(words)) == len(words)


@given(st.text(alphabet=string.ascii_letters + string.digits, min_size=8, max_size=20), st.sampled_from(["=", None]))
def test_value_of_a_secret_option_never_survives(value, equals):
    """Whatever a token is made of, it is hidden as the value of --token."""
    words = [f"--token={value}"] if equals else ["--token", value]
    assert redact(words) == (["--token=" + HIDDEN] if equals else ["--token", HIDDEN])

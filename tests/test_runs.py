"""Run folders: never mixed up, never overwritten."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trace_jax import runs
from trace_jax.runs import config_changes, create_run_dir, write_json

CONFIG = {
    "rl": {"steps": 10, "group": 8, "clip": (0.2, 0.28)},
    "model": {"layers": 4},
    "workdir": "a",
    "extra": {},
    "note": None,
}


def changed(**groups):
    return {k: (CONFIG[k] | groups[k]) if isinstance(groups.get(k), dict) else groups.get(k, v)
            for k, v in CONFIG.items()}


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_new_folder_says_what_ran(tmp_path):
    path = create_run_dir(tmp_path / "a" / "run", CONFIG)
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "versions.json"]
    assert json.loads((path / "config.json").read_text())["rl"]["group"] == 8
    versions = json.loads((path / "versions.json").read_text())
    for key in ("python", "jax", "flax", "hardware", "command", "git_commit"):
        assert key in versions
    command = shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]])
    assert "cpu" in versions["hardware"] and versions["command"] == command


def test_a_folder_in_use_is_refused_with_what_to_write(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="write --resume to go on, or another --workdir") as error:
        create_run_dir(tmp_path, CONFIG)
    one_line(error)
    with pytest.raises(ValueError, match="holds no run") as error:
        create_run_dir(tmp_path, CONFIG, resume=True)
    one_line(error)
    with pytest.raises(ValueError, match="is a file"):
        create_run_dir(tmp_path / "thesis.tex", CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_resume_takes_the_same_configuration(tmp_path):
    """Tuples become lists in JSON, which is no difference; neither are more steps."""
    create_run_dir(tmp_path / "r", CONFIG, resume=True)
    longer = changed(rl={"steps": 99}, workdir="b")
    create_run_dir(tmp_path / "r", longer, resume=True)
    create_run_dir(tmp_path / "r", longer, resume=True)
    assert json.loads((tmp_path / "r" / "config.json").read_text())["rl"]["steps"] == 99
    versions = json.loads((tmp_path / "r" / "versions.json").read_text())
    assert len(versions["resumed"]) == 2 and "resumed" not in versions["resumed"][1]


def test_a_resume_keeps_the_command_that_started_the_run(tmp_path, monkeypatch):
    for command in ("first", "second", "third"):
        monkeypatch.setattr(runs, "versions", lambda command=command: {"command": command})
        path = create_run_dir(tmp_path / "r", CONFIG, resume=True)
    assert json.loads((path / "versions.json").read_text()) == {
        "command": "first", "resumed": [{"command": "second"}, {"command": "third"}]
    }


def test_resume_of_another_configuration_says_what_differs(tmp_path):
    path = create_run_dir(tmp_path / "r", CONFIG)
    before = (path / "config.json").read_bytes()
    other = changed(rl={"group": 4, "steps": 3, "new": True}, note="x")
    other.pop("extra")
    with pytest.raises(ValueError) as error:
        create_run_dir(path, other, resume=True)
    said = one_line(error)
    assert said.endswith(
        'extra: {} -> (absent); note: null -> "x"; rl.group: 8 -> 4; rl.new: (absent) -> true'
    )
    assert (path / "config.json").read_bytes() == before
    create_run_dir(path, changed(model={"layers": 9}), resume=True, harmless=["model"])


def test_types_and_order_of_configurations():
    assert config_changes({"a": 1, "b": 2}, {"b": 2, "a": 1}) == []
    assert config_changes({"a": 1}, {"a": 1.0}) == [("a", "a: 1 -> 1.0")]
    assert config_changes({"a": 1}, {"a": True}) == [("a", "a: 1 -> true")]
    assert config_changes({"a": {"b": 1}}, {"a": 1}) == [
        ("a", "a: (absent) -> 1"), ("a.b", "a.b: 1 -> (absent)")
    ]


def test_a_damaged_config_is_not_taken_for_another(tmp_path):
    path = create_run_dir(tmp_path / "r", CONFIG)
    (path / "config.json").write_text('{"rl": ')
    with pytest.raises(ValueError, match="config.json is damaged") as error:
        create_run_dir(path, CONFIG, resume=True)
    one_line(error)


def test_a_config_that_is_no_json_leaves_no_file_behind(tmp_path):
    with pytest.raises(TypeError):
        create_run_dir(tmp_path / "r", {"bad": object()})
    assert not (tmp_path / "r").exists()


def test_a_start_that_was_killed_does_not_block_the_folder(tmp_path, monkeypatch):
    (tmp_path / ".config.json.tmp").write_text('{"rl"')
    create_run_dir(tmp_path, CONFIG)

    written = []

    def killed(path, value):
        if written:
            raise KeyboardInterrupt
        written.append(write_json(path, value))

    monkeypatch.setattr(runs, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        create_run_dir(tmp_path / "r", CONFIG)
    monkeypatch.undo()
    create_run_dir(tmp_path / "r", CONFIG, resume=True)


def test_without_git_the_run_goes_on(tmp_path, monkeypatch):
    def no_git(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    path = create_run_dir(tmp_path / "r", CONFIG)
    assert json.loads((path / "versions.json").read_text())["git_commit"] is None


def test_an_installed_copy_does_not_name_somebody_elses_commit(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "runs.py"))
    assert runs.versions()["git_commit"] is None and runs.versions()["git_dirty"] is None

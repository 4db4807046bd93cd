"""Flags on real command lines: what they set, and the line that a refusal prints."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trace_jax.config import Config, freeze

ROOT = Path(__file__).resolve().parent.parent


# experiments.train with the training itself left out: it prints the settings it would train.
# One process imports everything and forks for each command line.
DRIVER = """
import json, os, sys
from absl import flags
from experiments import cli, train
from trace_jax.config import to_dict

def show(config, workdir, resume):
    print(json.dumps(to_dict(config)), flush=True)
    sys.exit(0)

train.train = show
flags.mark_flags_as_required(["config", "workdir"])
for name, line in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        for target, suffix in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[2]}/{name}.{suffix}", os.O_WRONLY | os.O_CREAT), target)
        sys.argv = ["train", *line]
        cli.run(train.main)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([name, code]), flush=True)
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """{name: (exit code, standard output, standard error)} of each command line below."""
    folder = tmp_path_factory.mktemp("flags")
    (folder / "flags.txt").write_text("--config.rl.steps=77\n--config.mode=qat\n")
    config, workdir = "--config=configs/quickstart.py", f"--workdir={folder / 'run'}"
    base = [config, workdir]
    lines = {
        "plain": base,
        "flagfile": [*base, f"--flagfile={folder / 'flags.txt'}"],
        "tuple": [*base, "--config.guidance.sites=('k','v')", "--config.guidance.layers=0,2"],
        "float_for_int": [*base, "--config.rl.steps=1e3"],
        "nan": [*base, "--config.optim.learning_rate=nan"],
        "override_first": ["--config.rl.steps=77", *base],
        "unknown_key": [*base, "--config.rl.stpes=3"],
        "unknown_flag": [*base, "--wrokdir=x"],
        "missing_file": ["--config=configs/missing.py", workdir],
        "no_workdir": [config],
        "stray_word": [*base, "rl.steps=3"],
        "method": [*base, "--config.method=trace_codes", "--config.guidance.layers=0,2"],
        "against_method": [*base, "--config.method=qarl", "--config.rl.algorithm=grpo"],
    }
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(lines), str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    codes = dict(json.loads(line) for line in run.stdout.splitlines())
    assert not (folder / "run").exists(), "a command that trains nothing writes nothing"
    read = lambda name, suffix: (folder / f"{name}.{suffix}").read_text()
    return {name: (codes[name], read(name, "out"), read(name, "err")) for name in lines}


def settings(commands, name) -> Config:
    code, out, err = commands[name]
    assert code == 0, err
    return freeze(json.loads(out))


def refused_line(commands, name) -> str:
    """The only line on standard error of a refused command; exit code 2, no output."""
    code, out, err = commands[name]
    assert (code, out) == (2, ""), err
    (line,) = err.splitlines()
    return line


def test_command_line_gives_the_config_file_as_it_stands(commands):
    quickstart = importlib.import_module("configs.quickstart").get_config()
    assert settings(commands, "plain") == freeze(quickstart)


def test_flagfile_overrides_are_seen(commands):
    """BR-142: overrides in a --flagfile count."""
    config = settings(commands, "flagfile")
    assert (config.rl.steps, config.mode) == (77, "qat")


def test_tuples_are_overridden_from_the_command_line(commands):
    """BR-143: a tuple given as text."""
    guidance = settings(commands, "tuple").guidance
    assert (guidance.sites, guidance.layers) == (("k", "v"), "0,2")


def test_override_before_the_config_flag_is_a_clear_error(commands):
    """BR-142: an override placed before --config."""
    line = refused_line(commands, "override_first")
    assert line.startswith("error: ") and "config.rl.steps" in line


def test_float_text_for_an_integer_is_a_clear_error(commands):
    """BR-143: --config.rl.steps=1e3."""
    line = refused_line(commands, "float_for_int")
    assert line.startswith("error: ") and "config.rl.steps" in line and "1e3" in line


def test_a_method_is_shown_with_its_settings_and_those_given_by_hand(commands):
    config = settings(commands, "method")
    assert (config.guidance.bits, config.guidance.layers) == (4, "0,2")
    (line,) = commands["method"][2].splitlines()
    assert line.startswith("method trace_codes  mode trace  guidance.bits 4  guidance.layers 0,2")


def test_a_flag_beats_its_method_even_with_the_default(commands):
    assert settings(commands, "against_method").rl.algorithm == "grpo"
    assert settings(commands, "against_method").rl.old_logprobs == "rollout"


def test_nan_on_the_command_line_is_refused_by_us(commands):
    """BR-143: --config.optim.learning_rate=nan."""
    line = refused_line(commands, "nan")
    assert line == "error: optim.learning_rate is nan; write a finite number"


def test_unknown_key_on_the_command_line_names_the_nearest(commands):
    line = refused_line(commands, "unknown_key")
    assert "stpes" in line and "steps" in line.replace("stpes", "")


def test_unknown_flag_on_the_command_line_names_the_nearest(commands):
    line = refused_line(commands, "unknown_flag")
    assert "wrokdir" in line and "workdir" in line.replace("wrokdir", "")


@pytest.mark.parametrize(
    "name, word",
    [
        ("missing_file", "configs/missing.py"),
        ("no_workdir", "--workdir"),
        ("stray_word", "'rl.steps=3'; settings are written --config.key=value"),
    ],
)
def test_incomplete_command_line_is_one_line(commands, name, word):
    assert word in refused_line(commands, name)

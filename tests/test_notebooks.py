"""The notebooks: their cells run from top to bottom, on reduced settings, and carry no output."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
from run_helpers import share_compiled, tiny_tree

matplotlib.use("Agg")
FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = sorted(p.stem for p in FOLDER.glob("*.ipynb"))
REDUCED = {
    "01_fp4_and_guidance": {"VALUES": 1024},
    "02_quickstart": {"STEPS": 2, "WARM_STEPS": 2, "EVERY": 1},
    "03_reading_a_run": {"STEPS": 2, "WARM_STEPS": 2, "NOISE": 0.0},
}


def cells(name) -> list[dict]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]


def code(cell) -> str:
    """A cell's Python; lines for the shell become `pass`."""
    plain = lambda line: line.lstrip()[:1] not in ("!", "%")
    indent = lambda line: line[: len(line) - len(line.lstrip())]
    lines = "".join(cell["source"]).splitlines()
    return "\n".join(line if plain(line) else indent(line) + "pass" for line in lines)


@pytest.fixture
def shown(monkeypatch):
    """What a notebook displays; IPython need not be installed."""
    figures = []
    display = SimpleNamespace(clear_output=lambda wait: None, display=figures.append)
    # The last two are what matplotlib asks of it.
    asked = {"get_ipython": lambda: None, "version_info": (9, 0)}
    ipython = SimpleNamespace(display=display, **asked)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr("configs.quickstart.get_config", tiny_tree)
    share_compiled(monkeypatch)
    return figures


def run(name) -> dict:
    space = {"__name__": "__main__"}
    for cell in cells(name):
        if cell["cell_type"] != "code":
            continue
        exec(compile(code(cell), name, "exec"), space)
        if "parameters" in cell["metadata"].get("tags", ()):
            assert set(REDUCED[name]) <= set(space), "the reduced settings are those of the cell"
            space |= REDUCED[name]
    return space


def test_every_notebook_is_run_here():
    assert set(NAMES) == set(REDUCED)


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_carry_no_output_and_install_in_one_cell(name):
    source = ["".join(c["source"]) for c in cells(name)]
    assert all(not c.get("outputs") for c in cells(name))
    assert sum("pip install" in text for text in source) == 1
    assert source[0].startswith("# ")


def test_guidance_closes_the_gap_between_two_sides(shown, capsys):
    space = run("01_fp4_and_guidance")
    shares = space["shares"]
    assert shares["no guidance"] < 0.99 < 0.9999 < shares["one bit"]
    assert shares["no guidance"] < shares["scales alone"] < shares["whole codes"] == 1.0
    assert "code 7  magnitude 6.0  mantissa bit 1" in capsys.readouterr().out


def test_the_quickstart_draws_while_it_trains(shown, capsys):
    space = run("02_quickstart")
    assert len(space["rows"]) == len(shown) == 2
    assert space["config"].method == "trace"
    assert "before" in capsys.readouterr().out.splitlines()[-2]


def test_a_run_is_read_and_audited(shown, capsys):
    space = run("03_reading_a_run")
    assert len(space["rows"]) == 2 and space["parting"] is None
    text = capsys.readouterr().out
    assert "agreement/expert_in/layer1" in text and text.rstrip().endswith("no code differs")

"""Prepared TFDS sets: read by random access, judged, and one clear line when they are missing."""

import subprocess
import sys
import types

import pytest

from trace_jax.tasks import reward
from trace_jax.tasks.sandbox import SandboxUnavailable, require_isolation
from trace_jax.tasks.tfds_sets import gsm8k, lbpp, math_dataset, read_prepared

GSM8K = [
    {
        "question": f"Ann has {i} pens and buys 3. How many has she?",
        "answer": f"{i} + 3 = <<{i}+3={i + 3}>>{i + 3}\n#### 1,{i + 3:03d}",
        "annotation": f"{i} + 3",
        "short_answer": f"1,{i + 3:03d}",
    }
    for i in range(5)
]
MATH = [{"question": "Factor é: x**2 - 1.", "answer": "(x - 1)*(x + 1)"},
        {"question": "Solve 2*x = 5.", "answer": "5/2"}]
LBPP = [
    {
        "task_id": "lbpp/0",
        "language": "python",
        "title": "double",
        "instruction": "Write double(x).",
        "completion": "def double(x):\n    return 2 * x",
        "test_file": "",
        "test_list": ["assert double(2) == 4", "assert math.isclose(double(0.5), 1)"],
        "signature": "def double(x: float) -> float:",
        "categories": ["math"],
        "test_setup": "from code import double\nimport math",
    },
    {
        "task_id": "lbpp/1",
        "language": "python",
        "title": "needs a package",
        "instruction": "Write norm(x).",
        "completion": "import no_such_package\ndef norm(x):\n    return no_such_package.norm(x)",
        "test_file": "",
        "test_list": ["assert norm(2) == 4"],
        "signature": "def norm(x):",
        "categories": [],
        "test_setup": "from code import norm",
    },
]
SETS = {"gsm8k": GSM8K, "math_dataset/algebra": MATH, "lbpp/python": LBPP}


def why_not():
    try:
        require_isolation()
    except SandboxUnavailable as error:
        return str(error)
    return ""


REASON = why_not()
isolated = pytest.mark.skipif(bool(REASON), reason=REASON or "isolation is there")


def encoded(value):
    """As a data source gives it: texts are bytes, lists hold bytes."""
    if isinstance(value, dict):
        return {k: encoded(v) for k, v in value.items()}
    return [encoded(v) for v in value] if isinstance(value, list) else value.encode()


class Source:
    """The data source's protocol: a length and random access."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return encoded(self.rows[i])


def _prepare(folder):
    """Small sets in TFDS's own format and folders, without TensorFlow."""
    import tensorflow_datasets as tfds

    text = tfds.features.Text
    for name, rows in SETS.items():
        name, _, config = name.partition("/")
        kinds = {k: tfds.features.Sequence(text()) if isinstance(v, list) else text()
                 for k, v in rows[0].items()}

        def info(self, kinds=kinds):
            features = tfds.features.FeaturesDict(kinds)
            return tfds.core.DatasetInfo(builder=self, features=features)

        body = {
            "VERSION": tfds.core.Version("2.0.0" if name == "lbpp" else "1.0.0"),  # TFDS's own
            "BUILDER_CONFIGS": [tfds.core.BuilderConfig(name=config)] if config else [],
            "name": name,
            "_info": info,
            "_split_generators": lambda self, manager: {"test": self._generate_examples()},
            "_generate_examples": lambda self, rows=rows: enumerate(rows),
        }
        with tfds.core.registered.skip_registration():
            builder = type(name.title(), (tfds.core.GeneratorBasedBuilder,), body)
        made = builder(data_dir=folder, file_format="array_record")
        made.download_and_prepare()


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    pytest.importorskip("tensorflow_datasets", reason="tensorflow-datasets is not installed")
    folder = tmp_path_factory.mktemp("tfds")
    _prepare(folder)
    return folder


@pytest.fixture(params=["real", "stub"])
def folder(request, monkeypatch):
    """Every test reads real prepared data where TFDS is there, and a stand-in in any case."""
    if request.param == "real":
        return request.getfixturevalue("tfds_folder")

    def data_source(name, *, split, data_dir, download):
        assert download is False, "nothing may be fetched"
        if name not in SETS or split != "test":
            raise KeyError(f"no {name}\nwith more lines")
        return Source(SETS[name])

    module = types.SimpleNamespace(data_source=data_source)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    return "stub"


def test_gsm8k(folder):
    problems = gsm8k("test", folder)
    assert len(problems) == 5
    found = {problems.problem(i).prompt: problems.problem(i) for i in range(5)}
    assert sorted(found) == sorted(r["question"] + "\nEnd with #### and the number." for r in GSM8K)
    problem = next(p for q, p in found.items() if "has 4 pens" in q)
    assert problem.answer == "#### 1,007" and problem.source == "gsm8k"
    assert [reward(problem, t) for t in (problem.answer, "4 + 3\n#### 1007")] == [1.0, 1.0]
    assert [reward(problem, t) for t in ("#### 7", "1007", "4 + 3 = 7")] == [0.0] * 3
    assert [problems.problem(i).index for i in range(5)] == list(range(5))
    with pytest.raises(IndexError, match="there are 5 rows"):
        problems.problem(5)


def test_math_dataset(folder):
    problems = math_dataset("algebra", "test", folder)
    found = {p.answer: p for p in map(problems.problem, range(2))}
    half = found["\\boxed{5/2}"]
    assert half.prompt == "Solve 2*x = 5.\nPut the answer in \\boxed{}."
    assert [reward(half, f"\\boxed{{{t}}}") for t in ("2.5", "5/2", "2 1/2")] == [1.0] * 3
    assert reward(half, "\\boxed{5}") == reward(half, "5/2") == 0.0
    product = found["\\boxed{(x - 1)*(x + 1)}"]
    assert "é" in product.prompt and product.source == "math_dataset/algebra"
    assert reward(product, product.answer) == 1.0
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    assert reward(product, "\\boxed{x^2 - 1}") == 1.0
    assert reward(product, "\\boxed{x^2 + 1}") == 0.0


@isolated
def test_lbpp(folder):
    problems = lbpp("test", folder)
    assert (len(problems), problems.dropped) == (1, 1)
    problem = problems.problem(0)
    assert problem.prompt == "Write double(x).\ndef double(x: float) -> float:\n"
    assert reward(problem, problem.answer) == 1.0
    assert reward(problem, "```python\ndouble = lambda x: x + x\n```") == 1.0
    assert reward(problem, "def double(x):\n    return x * x") == 0.0
    assert len(lbpp("test", folder, checked=False)) == 2


@pytest.mark.parametrize("name, split", [("gsm8k", "train"), ("math_dataset/geometry", "test")])
def test_data_that_is_not_prepared_is_one_clear_line(folder, name, split):
    with pytest.raises(ValueError, match=f"tfds build {name}") as caught:
        read_prepared(name, split, folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_missing_tfds_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    for make in (lambda: gsm8k("test"), lambda: math_dataset("algebra", "test"), lbpp):
        with pytest.raises(ValueError, match=r"trace_jax\[data\]") as caught:
            make()
        assert "\n" not in str(caught.value)


def test_tensorflow_is_never_imported(tfds_folder):
    code = (
        "import sys\n"
        "from trace_jax.tasks.tfds_sets import gsm8k\n"
        "assert 'tensorflow_datasets' not in sys.modules\n"
        f"gsm8k('test', {str(tfds_folder)!r}).problem(0)\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

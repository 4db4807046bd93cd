"""Every kind of task by its name in a configuration: problems, splits, and clear refusals."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import SHAPE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trace_jax import scoring
from trace_jax.config import Config, ConfigError, TaskConfig, default, freeze
from trace_jax.model import ModelConfig
from trace_jax.rollout import Rollout
from trace_jax.scoring import choose, first_problems, make_prompts, problem_set, score
from trace_jax.tasks import ENVIRONMENTS, TASK_KINDS, ByteTokenizer, Problem, sources
from trace_jax.tasks.chat_tokenizer import ChatTokenizer
from trace_jax.tasks.sandbox import SandboxUnavailable
from trace_jax.warmup import spoiled

TOK = ByteTokenizer()


def config_of(kind, params=(), **task) -> Config:
    return Config(
        model=ModelConfig(**SHAPE), task=TaskConfig(kind=kind, params=tuple(params), **task)
    )


def refusal(kind, params=(), split="train") -> str:
    with pytest.raises(ConfigError) as caught:
        problem_set(config_of(kind, params), split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"what is {i} + {i}?", "answer": str(2 * i)} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


# --- kinds ------------------------------------------------------------------------------


def test_the_default_is_reasoning_gym():
    problem = problem_set(config_of("reasoning"), "train").problem(0)
    assert problem.source == "chain_sum" and problem.prompt.endswith("=")


def test_a_file_of_lines_is_split_and_visited_once_an_epoch(lines):
    config = config_of("jsonl", [("path", str(lines))])
    train, heldout = (problem_set(config, split) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 60 and 0 < len(heldout) < 20
    steps = [choose(train, step, len(train) // 2, seed=3) for step in range(2)]
    seen = [p.prompt for step in steps for p in step]
    assert len(set(seen)) == len(seen) == 2 * (len(train) // 2)
    assert not set(seen) & {heldout.problem(i).prompt for i in range(len(heldout))}


def test_more_held_out_problems_than_there_are_is_refused(lines):
    heldout = problem_set(config_of("jsonl", [("path", str(lines))]), "heldout")
    assert len(first_problems(heldout, len(heldout))) == len(heldout)
    with pytest.raises(ConfigError, match=rf"eval\.problems is 500 and {len(heldout)} are held"):
        first_problems(heldout, 500)


@pytest.mark.parametrize("kind", ["key_maze", "tools"])
def test_environments_give_episodes_whose_splits_share_nothing(kind):
    train, heldout = (problem_set(config_of(kind), s) for s in ("train", "heldout"))
    whole = lambda p: (p.prompt, p.answer)
    a = {whole(train.problem(i)) for i in range(80)}
    assert len(a) > 40 and not a & {whole(heldout.problem(i)) for i in range(80)}
    again = problem_set(config_of(kind), "train").problem(5)
    assert again == train.problem(5) and again.answer


def test_program_by_example_needs_its_difficulty_within_bounds():
    source = problem_set(config_of("examples", [("difficulty", 2)]), "train")
    assert source.problem(0).answer.count("x = ") == 2
    assert "difficulty is 9: write 1 to 6" in refusal("examples", [("difficulty", 9)])


def test_a_users_own_coding_problems(tmp_path):
    path = tmp_path / "code.jsonl"
    row = {"answer": "def f(x):\n    return x", "tests": "assert f(1) == 1", "names": ["f"]}
    path.write_text("\n".join(json.dumps(row | {"prompt": f"say {i}"}) for i in range(40)))
    train = problem_set(config_of("coding_jsonl", [("path", str(path))]), "train")
    assert 20 < len(train) < 40 and train.problem(0).scorer.names == ("f",)


def test_kinds_of_the_configuration_are_those_that_exist():
    assert set(TASK_KINDS) == {"reasoning", *sources.SOURCES, *ENVIRONMENTS}
    config = default(**SHAPE)
    config.task.kind = "gsm8"
    with pytest.raises(ConfigError, match=r"^task\.kind is 'gsm8'; did you mean 'gsm8k'\?"):
        freeze(config)
    config.task.kind, config.task.params = "jsonl", ("path", "x")
    with pytest.raises(ConfigError, match=r"^task\.params is \('path', 'x'\); write \(\(param"):
        freeze(config)


# --- refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, params, words",
    [
        ("jsonl", [("path", "/nowhere.jsonl")], "cannot be read"),
        ("jsonl", [], "parameters {} are refused"),
        ("math_dataset", [], "are refused"),
        ("key_maze", [("rooms", 3)], "parameters {'rooms': 3} are refused"),
        ("key_maze", [("width", 1), ("height", 1)], "write 4 rooms or more"),
    ],
)
def test_bad_parameters_are_one_clear_line(kind, params, words):
    message = refusal(kind, params)
    assert message.startswith(f"task.kind {kind!r}: ") and words in message


def test_data_sets_that_are_not_there_say_what_to_do(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorflow_datasets", None)
    for kind, params in (("gsm8k", []), ("math_dataset", [("category", "algebra__linear_1d")])):
        assert 'pip install "trace_jax[data]"' in refusal(kind, params)


def test_code_without_isolation_is_refused_before_any_work(monkeypatch):
    """BR-126: fails closed, with one line."""

    def missing():
        raise SandboxUnavailable("user namespaces are off: nothing was run")

    monkeypatch.setattr("trace_jax.tasks.coding_examples.require_isolation", missing)
    assert refusal("examples").endswith("user namespaces are off: nothing was run")


# --- judging ------------------------------------------------------------------------------


class Slow:
    """A scorer that runs a program, as far as the judge can tell."""

    whole_response, slow = True, True

    def __init__(self):
        self.asked = []

    def __call__(self, text):
        self.asked.append(text)
        if text == "down":
            raise OSError("no sandbox today")
        return float(text == "right")


def test_equal_programs_are_run_once_and_an_outage_is_no_reward():
    """BR-129: the sample whose sandbox failed is unscored, and only that one."""
    scorers = Slow(), Slow()
    problems = [Problem(i, f"p{i}", "right", "code", s) for i, s in enumerate(scorers)]
    config = config_of("reasoning", max_prompt=6, max_response=8)
    prompts = make_prompts(problems, TOK, config)
    texts = ["right", "wrong", "right", "down", "wrong", "right", "right", "cut"]
    tokens = np.zeros((8, 14), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        ids = [TOK.bos_id, *b"p0", *TOK.encode(text), TOK.eos_id]
        row[: len(ids)] = ids
    fields = dict.fromkeys(f.name for f in dataclasses.fields(Rollout))
    rollout = Rollout(
        **fields
        | dict(
            tokens=tokens,
            prompt_length=np.full(8, 3),
            length=np.array([3 + len(t) + 1 for t in texts]),
            finished=np.array([True] * 7 + [False]),
        )
    )
    rewards, valid = score(rollout, prompts, TOK, 4)
    np.testing.assert_array_equal(rewards, [[1, 0, 1, 0], [0, 1, 1, 0]])
    np.testing.assert_array_equal(valid, [[True, True, True, False], [True] * 4])
    assert sorted(scorers[0].asked) == ["down", "right", "wrong"]
    assert sorted(scorers[1].asked) == ["right", "wrong"], "what was cut off is not run"
    assert scoring.SLOW_SCORERS >= 1


def test_an_unreliable_teacher_reverses_lines_of_programs_and_walks():
    walk = Problem(0, "p", "north\nwest\ntake", "maze")
    assert spoiled(walk, 1.0 - 1e-12).answer == "take\nwest\nnorth"
    assert spoiled(Problem(0, "p", "a b c", "words"), 1.0 - 1e-12).answer == "c b a"


# --- turns of a chat model ------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(template) -> ChatTokenizer:
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return ChatTokenizer(core, (core.token_to_id("<|im_end|>"),), template)


def test_turns_of_a_chat_model_add_up_to_the_whole_conversation():
    """BR-047: what is appended to the sampled ids is what the template would have written."""
    tok = chat_tokenizer(CHATML)
    said = [*tok.prompt_ids("Doors: north."), *tok.encode("north"), *tok.eos_ids]
    said += tok.turn_ids("Doors: south.\n> ")
    roles = ("user", "Doors: north."), ("assistant", "north"), ("user", "Doors: south.\n> ")
    whole = tok.chat([{"role": r, "content": c} for r, c in roles])
    assert said == tok.encode(whole)


def test_a_template_without_an_end_of_turn_is_refused():
    tok = chat_tokenizer("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    with pytest.raises(ValueError, match="does not end the model's turn with an EOS"):
        tok.turn_ids("go on")
